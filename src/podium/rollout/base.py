"""What every rollout engine offers: take weights of a version, generate, and refuse weights that are too old.

What is not here: how an engine is chosen (`registry`), and anything that only one engine needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from podium.config import SamplingConfig
from podium.errors import StaleWeightsError
from podium.protocol import DataProto, whole_number, with_padding, without_padding
from podium.protocol.jagged import interleave


class BaseRollout(ABC):
    """Generates with a copy of the policy that is its own. One caller at a time."""

    version: int | None = None
    """Version of the weights held; None before the first `update_weights`, and after one that failed half-way."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take a complete stream of (name, tensor), as `weights.named_weights` gives it, and call it `version`.

        The tensors are copied: the trainer may change them afterwards. Nothing computed with older weights is used again.
        """

    def generate(self, prompts: DataProto, sampling: SamplingConfig, *, seed: int, step: int) -> DataProto:
        """`sampling.n` responses to each of B prompts: B*n rows, the samples of one prompt side by side.

        prompts: jagged column `prompts` int64 [B, *] and object column `uid` (a distinct str per row). All its columns are
        repeated, its meta is kept, and these are new, tensors on the device of `prompts`:

        * `responses` jagged int64: the tokens drawn; an end-of-sequence token, or the text of a stop string, is part of it
        * `input_ids` jagged int64: prompt, then response
        * `response_mask` jagged int64: 1 for every token of the response
        * `rollout_log_probs` jagged float32 (float64 for a float64 model): log-softmax of logits / temperature at the token,
          before top-k and top-p, as a trainer recomputes it; with temperature 0, of the logits as they are
        * `sample_index` int64 [B*n]: 0 to n-1 within the prompt
        * `weight_version` int64 [B*n]
        * `finish_reason` objects: "stop" (end of sequence or stop string) or "length"

        Padding rows are not answered: theirs are n padding rows with an empty response, no reason, and 0 in the other columns.
        The same (seed, step, uid, sample index) draws the same randomness, wherever and beside whatever it runs; seed and step
        are integers of Python, numpy or torch. Raises StaleWeightsError before the first `update_weights`, DataError for
        prompts that cannot be used and for a seed or a step that is not an integer.
        """
        numbers = {"seed": whole_number("seed", seed), "step": whole_number("step", step)}
        drawn = self._generate(without_padding(prompts), sampling, **numbers)
        rows = prompts.repeat(sampling.n)
        rows.union(with_padding(drawn, rows.padding_mask))
        return rows.union(DataProto({"input_ids": interleave(rows.batch["prompts"], rows.batch["responses"])}))

    @abstractmethod
    def _generate(self, prompts: DataProto, sampling: SamplingConfig, *, seed: int, step: int) -> DataProto:
        """What `generate` adds to the repeated prompts, which are real rows, perhaps none: its new columns but `input_ids`."""

    def require_version(self, expected: int | None = None) -> int:
        """The version held, once it is sure that it is `expected` (any version will do for None); else StaleWeightsError."""
        if self.version is None:
            raise StaleWeightsError("the rollout holds no weights yet (or a copy failed half-way); call update_weights() first")
        if expected is not None and self.version != expected:
            raise StaleWeightsError(
                f"the rollout holds weights of version {self.version}, expected {expected}; call update_weights() after an update"
            )
        return self.version
