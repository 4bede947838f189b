"""Plans of micro-batches: every row once, never above the cap, little padding, and the cheaper layout."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.engines.micro_batch import MAX_PADDING_FRAC, CostModel, MicroBatch, Prompts, plan_micro_batches

Layout = Literal["auto", "bucketed", "packed"]
LAYOUTS: tuple[Layout, ...] = ("auto", "bucketed", "packed")
COST = CostModel()


def computed_tokens(micro: MicroBatch, lengths: list[int]) -> int:
    own = [lengths[row] for row in micro.rows.tolist()]
    return sum(own) if micro.layout == "packed" else len(own) * max(own)


@given(
    st.lists(st.integers(0, 40), max_size=40),
    st.integers(40, 120),
    st.sampled_from(LAYOUTS),
    st.builds(CostModel, st.floats(0.01, 1000), st.floats(1e-5, 1)),
)
def test_every_row_once_and_never_above_the_cap(lengths: list[int], cap: int, layout: Layout, cost: CostModel) -> None:
    """Any lengths, any cap, any costs; empty rows too. Rows side by side are padded by less than a tenth."""
    micros = plan_micro_batches(lengths, max_tokens=cap, layout=layout, cost=cost)
    assert sorted(row for micro in micros for row in micro.rows.tolist()) == list(range(len(lengths)))
    assert all(micro.rows.dtype == torch.int64 and len(micro.rows) for micro in micros)
    computed = [computed_tokens(micro, lengths) for micro in micros]
    assert max(computed, default=0) <= cap
    assert len({micro.layout for micro in micros}) <= 1
    assert all(layout in ("auto", micro.layout) for micro in micros)
    assert sum(computed) - sum(lengths) <= MAX_PADDING_FRAC * sum(computed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_rows_of_sixty_do_not_fit_in_two_times_a_hundred(layout: Layout) -> None:
    """The quotient ceil(180 / 100) is 2, but a pair would hold 120."""
    micros = plan_micro_batches([60, 60, 60], max_tokens=100, layout=layout, cost=COST)
    assert [len(micro.rows) for micro in micros] == [1, 1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_as_long_as_the_cap_is_a_micro_batch(layout: Layout) -> None:
    assert len(plan_micro_batches([100], max_tokens=100, layout=layout, cost=COST)) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_need_no_micro_batches(layout: Layout) -> None:
    assert plan_micro_batches([], max_tokens=100, layout=layout, cost=COST) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_repeatable(layout: Layout) -> None:
    lengths = [5, 9, 5, 17, 2, 9, 30, 5]
    first, second = (plan_micro_batches(lengths, max_tokens=40, layout=layout, cost=COST) for _ in range(2))
    assert [(micro.rows.tolist(), micro.layout) for micro in first] == [(micro.rows.tolist(), micro.layout) for micro in second]


def layout_of(lengths: list[int], cost: CostModel, cap: int = 10_000) -> str:
    return plan_micro_batches(lengths, max_tokens=cap, layout="auto", cost=cost)[0].layout


def test_equal_lengths_go_side_by_side_and_a_mixture_of_short_rows_end_to_end() -> None:
    """Equal rows: one call without padding either way, but packing pays 2000**2 / 512 for its mask. A mixture: 16 calls or 1."""
    assert layout_of([20] * 100, COST) == "bucketed"
    assert layout_of([2**power // 16 + 1 for power in range(4, 11)], COST) == "packed"


def test_each_price_can_decide() -> None:
    lengths = [3, 5, 8, 13, 21, 34]
    assert layout_of(lengths, CostModel(call_tokens=1000, mask_tokens=0.01)) == "packed"
    assert layout_of(lengths, CostModel(call_tokens=0.01, mask_tokens=0.01)) == "bucketed"
    assert layout_of(lengths, CostModel(call_tokens=1000, mask_tokens=10)) == "bucketed"


def test_packed_rows_stay_as_short_as_their_mask_is_dear() -> None:
    lengths = [10] * 12
    cheap, dear = (
        plan_micro_batches(lengths, max_tokens=120, layout="packed", cost=CostModel(call_tokens=100, mask_tokens=mask))
        for mask in (1e-3, 0.1)
    )
    assert len(cheap) == 1
    assert max(computed_tokens(micro, lengths) for micro in dear) == 30  # sqrt(100 / 0.1) is 31.6


def test_costs_scale_with_the_hidden_size() -> None:
    assert CostModel.for_hidden(96) == CostModel(128.0, 1 / 512)
    assert CostModel.for_hidden(192) == CostModel(32.0, 1 / 1024)


def test_many_rows_are_planned_fast() -> None:
    lengths = torch.randint(1, 2000, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    micros = plan_micro_batches(lengths, max_tokens=16384, layout="bucketed", cost=COST)
    assert sum(len(micro.rows) for micro in micros) == 4000


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=40),
    st.integers(40, 200),
    st.builds(CostModel, st.floats(0.01, 1000), st.floats(1e-5, 1)),
)
def test_shared_prompts_keep_every_row_once_below_the_cap(rows: list[tuple[int, int]], cap: int, cost: CostModel) -> None:
    """Prompt i has 3 i + 1 tokens. A sequence holds rows of one prompt, and a micro-batch no more than the cap."""
    prompts = Prompts([prompt for prompt, _ in rows], [3 * prompt + 1 for prompt, _ in rows])
    lengths = [3 * prompt + 1 + response for prompt, response in rows]
    micros = plan_micro_batches(lengths, max_tokens=cap, layout="shared", cost=cost, prompts=prompts)
    assert sorted(row for micro in micros for row in micro.rows.tolist()) == list(range(len(rows)))
    for micro in micros:
        assert micro.units is not None
        sequences: dict[int, list[int]] = {}
        for row, unit in zip(micro.rows.tolist(), micro.units.tolist(), strict=True):
            sequences.setdefault(unit, []).append(row)
        assert list(sequences) == list(range(len(sequences)))
        assert all(len({prompts.ids[row] for row in members}) == 1 for members in sequences.values())
        longest = max(prompts.lengths[m[0]] + sum(rows[row][1] for row in m) for m in sequences.values())
        assert len(sequences) * longest <= cap
