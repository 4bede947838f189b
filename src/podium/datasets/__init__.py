"""Which problems a step sees, and problems as batches of tokens."""

from podium.datasets.batches import prompt_batch, prompt_tokens, supervised_batch
from podium.datasets.sampler import StepSampler
from podium.datasets.special_tokens import special_token_remarks

__all__ = ["StepSampler", "prompt_batch", "prompt_tokens", "special_token_remarks", "supervised_batch"]
