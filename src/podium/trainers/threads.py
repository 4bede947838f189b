"""How many torch threads each rank gets: for a small model one, whatever the machine has."""

from __future__ import annotations

from podium.config import ModelConfig, RunConfig
from podium.models import load_model_config

SMALL_MODEL_PARAMETERS = 5_000_000
"""Below it one thread is the default. On two idle cores a second thread makes a step up to 1.6 times faster; with another busy
process there, up to 10 times slower, since the threads wait for each other after each of many small operations."""


def threads_per_rank(config: RunConfig) -> int:
    """`config.threads_per_rank`, where 0 (cores / ranks) is 1 for a small model."""
    return config.threads_per_rank or int(_num_parameters(config.model) < SMALL_MODEL_PARAMETERS)


def threads_line(config: RunConfig) -> str | None:
    """What was chosen for a small model, in words; None where the settings or the machine decide."""
    if config.threads_per_rank or not threads_per_rank(config):
        return None
    millions = _num_parameters(config.model) / 1e6
    return f"1 torch thread per rank, for a model of about {millions:.2g} M parameters (threads_per_rank sets another number)"


def _num_parameters(model: ModelConfig) -> int:
    """About how many the model has, by its config alone: embeddings, and attention and MLP of each layer."""
    text = load_model_config(model).get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    return int(text.vocab_size * hidden + layers * (4 * hidden * hidden + 3 * hidden * inner))
