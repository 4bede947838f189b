"""Trials: does a model compute rows in the layouts `packed` and `shared` as it computes each alone?

These layouts rely on positions and masks, which some architectures ignore: a recurrent state crosses rows, or an explicit mask
lacks a window. What is not here: how rows become a forward pass (`layouts`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.engines.micro_batch import MicroBatch
from podium.models import row_limit
from podium.protocol import DataProto
from podium.protocol.jagged import interleave, jagged_from_rows

MaskedLayout = Literal["packed", "shared"]
MASKED_LAYOUTS: tuple[MaskedLayout, ...] = ("packed", "shared")
LogProbs: TypeAlias = Callable[[DataProto, MicroBatch], Tensor]
"""The log-probs of the response tokens of a micro-batch, end to end, float32 or float64."""

BETWEEN_SHAPES = 4
"""Units in the last place of the largest log-prob by which passes of two shapes may differ. On a CPU in bfloat16 they are equal;
a device whose masked passes have other kernels may round differently. A wrong context differs by much more (SmolLM2-135M: 19)."""
MIN_TOLERANCE = 1e-3
"""Nats by which passes of two shapes may differ in any dtype."""
FLIPPED_FRAC = 0.01
"""Share of the tokens that may differ by more, in a dtype below float32: rounding sends some to other experts of a mixture."""
LEAK = 1e-5
"""Share of the largest log-prob by which a row may change with the row before it. Both passes have one shape, so this is far
below rounding between shapes, and shows a model whose rows mix very little."""
SPARE_POSITIONS = 8
"""Most entries that a table by position has beyond the model's positions: OPT's begins at 2."""
MIN_ROW = 3
"""Tokens of the shortest row that is tried: a prompt of one, and two to compare."""


def distances(config: object) -> tuple[int, ...]:
    """Every integer above 1 in a model's config, ascending: windows, chunks and whatever else may be a distance in tokens.

    By value, not by name: families name their windows in many ways. A number that is not a distance costs one trial.
    """
    return tuple(sorted(set(_numbers(config))))


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int) and value > 1:
        yield value


def max_sequence(model: PreTrainedModel) -> int | None:
    """Most tokens of a sequence that rows share, where the model has a table by absolute position; None: no limit.

    Such a table is an embedding or a causal mask with one entry for each position. Positions restart with each row, but some
    models index the table by the place in the sequence, beyond its end. Models without a table take any sequence.
    """
    limit = row_limit(model.config)
    if limit is None:
        return None
    own = model.get_input_embeddings()
    embeddings = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not own]
    tables = [size for buffer in model.buffers() if buffer.dim() > 1 for size in buffer.shape]
    has_table = any(limit.tokens <= size <= limit.tokens + SPARE_POSITIONS for size in (*embeddings, *tables))
    return limit.tokens if has_table else None


class LayoutUnsupported(Exception):  # noqa: N818 - a verdict, which never leaves the engine
    """A model's forward does not take the inputs of a layout."""


@dataclass(frozen=True)
class Reach:
    """How far a batch looks: tokens of its longest row, and of the longest sequence that its rows share."""

    row: int
    sequence: int


class LayoutTrials:
    """The verdicts of one model. A verdict holds for one range of lengths; in the next range the layout is tried again.

    A range ends at an integer of the model's config or at a power of two. So rows of 300 tokens are tried at 512 tokens, where a
    window of 4,096 does not matter. Rows of more than 4,096 tokens are tried again.
    """

    def __init__(self, config: Mapping[str, Any], *, num_tokens: int, max_tokens: int, dtype: torch.dtype) -> None:
        """`config`: the model's; `num_tokens`: its vocabulary; `max_tokens`: most of a sequence; `dtype`: that of its passes."""
        self._ends = distances(config)
        self._num_tokens, self._max_tokens = num_tokens, max_tokens
        self._rounding, self._known = float(torch.finfo(dtype).eps), dict[tuple[MaskedLayout, Reach], bool]()

    def verdict(self, layout: MaskedLayout, reach: Reach, find: Callable[[Reach], bool]) -> bool:
        """Whether the layout is exact up to this reach: a known verdict, or that of `find` for the reach to try."""
        key = layout, Reach(self._end(reach.row), self._end(reach.sequence))
        if key not in self._known and self._is_within(*key):
            self._known[key] = True
        if key not in self._known:
            row = max(MIN_ROW, min(self._end(reach.row), self._max_tokens - MIN_ROW))
            # One row more than the batch's sequence, so that a cut just before the sequence's end goes through a whole row.
            self._known[key] = find(Reach(row, max(row + MIN_ROW, min(reach.sequence + row, self._max_tokens))))
        return self._known[key]

    def _is_within(self, layout: MaskedLayout, reach: Reach) -> bool:
        """Whether the layout was exact for rows and sequences of at least these lengths."""
        exact = [other for (known, other), is_exact in self._known.items() if is_exact and known == layout]
        return any(other.row >= reach.row and other.sequence >= reach.sequence for other in exact)

    def try_out(self, layout: MaskedLayout, reach: Reach, log_probs: LogProbs) -> bool:
        """Three passes of at most `max_tokens`: a row must have the log-probs that it has alone, and not depend on the first row.

        Both within rounding. Alone means in the layout `bucketed`, which does not need a mask.
        """
        prompts, responses = self._rows(layout, reach)
        units = torch.zeros(len(responses), dtype=torch.int64) if layout == "shared" else None
        trial = MicroBatch(torch.arange(len(responses)), layout, units)
        first = len(responses[0])
        found = log_probs(_rows(prompts, responses), trial)[first:]
        other = [(responses[0] + 1) % self._num_tokens, *responses[1:]]
        other_prompts = prompts if layout == "shared" else [(prompts[0] + 1) % self._num_tokens, *prompts[1:]]
        leaked = (log_probs(_rows(other_prompts, other), trial)[first:] - found).abs().max()
        side_by_side = MicroBatch(torch.arange(len(responses) - 1), "bucketed")
        alone = log_probs(_rows(prompts[1:], responses[1:]), side_by_side)
        largest = float(alone.abs().max())
        tolerance = max(MIN_TOLERANCE, BETWEEN_SHAPES * self._rounding * largest)
        # A NaN is larger than any tolerance here.
        num_off = int((~((found - alone).abs() <= tolerance)).sum())
        return float(leaked) <= LEAK * largest and num_off <= (FLIPPED_FRAC * len(alone) if self._rounding > 1e-4 else 0)

    def _rows(self, layout: MaskedLayout, reach: Reach) -> tuple[list[Tensor], list[Tensor]]:
        """Prompts and responses of random tokens that fill one sequence: a first row of another length, then the longest rows.

        The first row shifts the others off the multiples of their length, where a chunk would end between rows.
        """
        generator = torch.Generator().manual_seed(0)
        prompt = reach.row // 2 if layout == "shared" else 1
        response, room = reach.row - prompt, reach.sequence - (prompt if layout == "shared" else 0)
        step = response if layout == "shared" else reach.row
        first = max(2, min(step // 2 + 1, room - step))
        sizes = [first, *[step] * max(1, (room - first) // step)]
        if layout == "packed":
            sizes = [max(2, size - 1) for size in sizes]
        same = torch.randint(self._num_tokens, (prompt,), generator=generator)
        prompts = [same if layout == "shared" else torch.randint(self._num_tokens, (1,), generator=generator) for _ in sizes]
        return prompts, [torch.randint(self._num_tokens, (size,), generator=generator) for size in sizes]

    def _end(self, length: int) -> int:
        """Where the range of lengths that holds this one ends."""
        power = 1 << max(0, length - 1).bit_length()
        place = bisect_left(self._ends, length)
        return min(power, self._ends[place]) if place < len(self._ends) else power


def _rows(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> DataProto:
    columns = jagged_from_rows(list(prompts)), jagged_from_rows(list(responses))
    return DataProto({"input_ids": interleave(*columns), "responses": columns[1]})
