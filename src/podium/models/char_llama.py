"""The built-in character-level Llama: a real transformers model and tokenizer, small enough to train on a laptop's CPU.

99 tokens: padding, begin and end of sequence, newline, and the 95 printable ASCII characters. 249,600 parameters.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = ["\n", *map(chr, range(32, 127))]


def char_llama_config() -> LlamaConfig:
    """Hidden size 96, two layers, four heads, tied embeddings, 256 positions."""
    return LlamaConfig(
        vocab_size=3 + len(CHARACTERS),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, BOS put before every text. A character outside the table has no token and is dropped."""
    vocabulary = {token: number for number, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
