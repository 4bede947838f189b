"""Which problems a step sees, and problems as batches of tokens."""

from podium.datasets.batches import prompt_batch, prompt_tokens, supervised_batch
from podium.datasets.sampler import StepSampler

__all__ = ["StepSampler", "prompt_batch", "prompt_tokens", "supervised_batch"]
