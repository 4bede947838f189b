"""How the rows of a micro-batch become one forward pass: three layouts of the same computation.

*Bucketed*: rows side by side, padded on the right; causal attention never looks there, so no mask is needed. *Packed*: rows
end to end in one sequence with restarting positions, from which transformers builds a block-diagonal mask. *Shared*: one
sequence a unit, its prompt once and then the responses to it, each seeing the prompt and itself by an explicit mask; so the
prompt of n samples is computed once. Legend: B rows, N response tokens end to end, U units, S sequences, T their length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from podium.protocol.jagged import lengths_of, parts, to_padded


@dataclass(frozen=True)
class ModelInput:
    """One forward pass, and where in its logits each response token is predicted."""

    input_ids: Tensor
    """[S, T] int64."""
    sequences: Tensor
    """[N] int64: the sequence that predicts each response token."""
    columns: Tensor
    """[N] int64: its place there."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further keyword arguments of the model: positions and masks where the model could not know them."""


def bucketed(input_ids: Tensor, responses: Tensor) -> ModelInput:
    """Rows side by side: S = B."""
    row_N, place_N = _rows_and_places(responses)
    starts_B = lengths_of(input_ids) - lengths_of(responses)
    return ModelInput(to_padded(input_ids), row_N, starts_B[row_N] + place_N - 1)


def packed(input_ids: Tensor, responses: Tensor) -> ModelInput:
    """Rows end to end: S = 1."""
    ids_T, offsets = parts(input_ids)
    _, positions_T = _expand(lengths_of(input_ids))
    row_N, place_N = _rows_and_places(responses)
    starts_B = offsets[1:] - lengths_of(responses)
    return ModelInput(ids_T[None], torch.zeros_like(row_N), starts_B[row_N] + place_N - 1, {"position_ids": positions_T[None]})


def shared(input_ids: Tensor, responses: Tensor, unit_B: Tensor) -> ModelInput:
    """Units side by side: S = U. Rows of a unit are neighbours and have the same prompt; `unit_B` counts from 0."""
    ids, offsets = parts(input_ids)
    prompt_B, response_B = lengths_of(input_ids) - lengths_of(responses), lengths_of(responses)
    first_U = torch.searchsorted(unit_B, torch.arange(int(unit_B[-1]) + 1, device=ids.device))
    before_B = response_B.cumsum(0) - response_B
    starts_B = prompt_B + before_B - before_B[first_U][unit_B]
    row_N, place_N = _rows_and_places(responses)
    unit_P, place_P = _expand(prompt_B[first_U])
    unit, column = torch.cat([unit_P, unit_B[row_N]]), torch.cat([place_P, starts_B[row_N] + place_N])
    shape = int(first_U.numel()), int(column.max()) + 1
    tokens = torch.cat([ids[offsets[first_U][unit_P] + place_P], parts(responses)[0]])
    positions = torch.cat([place_P, prompt_B[row_N] + place_N])
    # who a token belongs to: 0 its unit's prompt, 1.. the rows, -1 padding
    owners = torch.cat([torch.zeros_like(place_P), row_N + 1])
    ids_UT, positions_UT, owners_UT = (
        _scatter(shape, unit, column, x, fill) for x, fill in ((tokens, 0), (positions, 0), (owners, -1))
    )
    last_of_prompt = prompt_B[row_N] - 1
    predicted_at = torch.where(place_N == 0, last_of_prompt, starts_B[row_N] + place_N - 1)
    mask = _visible(owners_UT)
    return ModelInput(ids_UT, unit_B[row_N], predicted_at, {"position_ids": positions_UT, "attention_mask": mask})


def _visible(owners_UT: Tensor) -> Tensor:
    """[U, 1, T, T] bool: a token sees the earlier ones of its unit's prompt and of its own response, and itself."""
    length = owners_UT.shape[1]
    is_earlier = torch.ones(length, length, dtype=torch.bool, device=owners_UT.device).tril()
    is_own = owners_UT[:, :, None] == owners_UT[:, None, :]
    itself = torch.eye(length, dtype=torch.bool, device=owners_UT.device)
    return (((is_own | (owners_UT == 0)[:, None, :]) & is_earlier) | itself)[:, None]


def _rows_and_places(responses: Tensor) -> tuple[Tensor, Tensor]:
    """[N] the row of each response token, and its place in the response."""
    return _expand(lengths_of(responses))


def _expand(lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each value of rows of these lengths: which row, and which place in it."""
    row = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    starts = lengths_B.cumsum(0) - lengths_B
    return row, torch.arange(len(row), device=row.device) - starts[row]


def _scatter(shape: tuple[int, int], row: Tensor, column: Tensor, values: Tensor, fill: int) -> Tensor:
    table = values.new_full(shape, fill)
    table[row, column] = values
    return table
