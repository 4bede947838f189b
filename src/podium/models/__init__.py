"""Loading causal language models and their tokenizers."""

from podium.models.limits import RowLimit, row_limit
from podium.models.loading import (
    BUILT_IN,
    eos_token_ids,
    load_model,
    load_model_config,
    load_tokenizer,
    pad_token_id,
    save_model,
)
from podium.models.sources import check_model_path, fetch_model, local_folder, model_folder

__all__ = [
    "BUILT_IN",
    "RowLimit",
    "check_model_path",
    "eos_token_ids",
    "fetch_model",
    "load_model",
    "load_model_config",
    "load_tokenizer",
    "local_folder",
    "model_folder",
    "pad_token_id",
    "row_limit",
    "save_model",
]
