"""`reads` and `writes` at the calls: what is declared beside the method is found missing before or after it, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.errors import DispatchError
from podium.protocol import DataProto
from podium.single_controller import Copy, Dispatch, PerRank, ResourcePool, Worker, WorkerGroup, register
from podium.single_controller.routing.dispatch import collect_dp_compute_data_proto

ROWS = DataProto({"x": torch.arange(4), "mask": torch.ones(4)}, {"uid": list("abcd")}, {"step": 1})


def make_doubled(group: Any, batch: DataProto) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A user's mode whose ranks read a column that the caller does not have; the last rank gets no rows."""
    doubled = DataProto({"doubled": batch.batch["x"] * 2})
    return ([doubled] * (group.world_size - 1) + [None],), {}


MAKING = {"dispatch_fn": make_doubled, "collect_fn": lambda group, outputs: outputs}


class Reader(Worker):
    """Counts its calls, to show that nothing was sent."""

    calls = 0

    @register(Dispatch.ONE_TO_ALL)
    def num_calls(self) -> int:
        return self.calls

    @register(Dispatch.DP_COMPUTE_PROTO, reads=["x", "uid"], writes=["y"])
    def read(self, batch: DataProto, other: Any = None, *, answer: tuple[Any, ...] = (), on_rank: int = 1) -> Any:
        self.calls += 1
        if answer and self.rank == on_rank:
            return answer[0]
        return DataProto({"y": torch.zeros(len(batch)), "more": torch.zeros(len(batch))})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=["x"], writes=["y"])
    def read_later(self, batch: DataProto) -> DataProto:
        self.calls += 1
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, reads=[], writes=[])
    def read_nothing(self, batch: DataProto) -> DataProto | None:
        return None

    @register(Dispatch.DP_COMPUTE_METRIC, reads=["x"], writes=["y"])
    def measure(self, batch: DataProto) -> int:
        return len(batch)

    @register(MAKING, reads=["doubled"])
    def of_doubled(self, batch: DataProto | None) -> int:
        return -1 if batch is None else int(batch.batch["doubled"].sum())

    @register(MAKING, reads=["trebled"])
    def of_trebled(self, batch: DataProto | None) -> int:
        self.calls += 1
        return 0

    @register({"dispatch_fn": make_doubled, "collect_fn": collect_dp_compute_data_proto}, writes=["y"])
    def without_y(self, batch: DataProto | None) -> DataProto | None:
        return batch


@pytest.fixture(scope="module")
def group():
    with WorkerGroup(ResourcePool([2]), Reader, runtime="inline", name="readers") as group:
        yield group


@pytest.fixture(params=[lambda rows: rows, DataProto.to_tensordict], ids=["DataProto", "TensorDict"])
def kind(request):
    return request.param


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DispatchError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_a_column_that_no_batch_has_is_refused_before_anything_is_sent(group, kind):
    before = group.num_calls()
    found = refusal(group.read, kind(ROWS.select(["mask"]).union(DataProto({"xx": torch.zeros(4)}))))
    assert found == (
        "readers.read (DP_COMPUTE_PROTO): the method reads the column 'x', which no batch of the call has; did you mean 'xx'?; "
        "there are: mask, uid, xx"
    )
    assert "'uid', which no batch of the call has; there are: x" in refusal(group.read, kind(ROWS.select(["x"], [])))
    assert "there are: none" in refusal(group.read, kind(DataProto(meta_info={"x": 1})))
    assert group.num_calls() == before


def test_the_batches_of_a_call_have_the_columns_together(group, kind):
    halves = kind(ROWS.select(["x"], [])), kind(ROWS.select(["mask"]))
    assert group.read(*halves).batch["y"].tolist() == [0.0] * 4
    assert len(group.read(halves[0], other=halves[1])) == 4
    assert len(group.read(halves[0], Copy(halves[1]))) == 4  # a batch that every rank gets whole is one too
    assert len(group.read(halves[0], PerRank([halves[1], halves[1]]))) == 4
    assert "'uid'" in refusal(group.read, halves[0], PerRank([halves[1], None]))


def test_no_rows_have_columns_too(group):
    assert len(group.read(ROWS[:0])) == 0
    assert "'x'" in refusal(group.read, ROWS[:0].select(["mask"]))


def test_a_call_that_does_not_wait_refuses_at_the_call_too(group):
    before = group.num_calls()
    assert "'x'" in refusal(group.read_later, ROWS.select(["mask"]))
    assert group.num_calls() == before


def test_a_column_is_looked_for_in_the_value_of_a_future(group):
    later = group.read_later(ROWS.select(["x"]).union(DataProto({"y": torch.zeros(4)})))
    assert len(group.read(later)) == 4
    without = group.read_later(ROWS.select(["x"], []).union(DataProto({"y": torch.zeros(4)})))
    assert "'uid'" in refusal(group.read, without)


def test_an_answer_that_lacks_a_declared_column_is_refused_with_its_rank(group, kind):
    answer = kind(DataProto({"yy": torch.zeros(2), "more": torch.zeros(2)}))
    assert refusal(group.read, ROWS, answer=(answer,)) == (
        "readers.read (DP_COMPUTE_PROTO): rank 1 returned rows without the column 'y', which the method declares to write; "
        "did you mean 'yy'?; there are: more, yy"
    )
    assert "rank 0 must return rows with y, which the method declares to write, got None" in refusal(
        group.read, ROWS, answer=(None,), on_rank=0
    )
    assert "rank 1 returned int" in refusal(group.read, ROWS, answer=(3,))  # the mode's own message
    assert "rank 0 returned rows without the column 'y'" in refusal(group.read_later(ROWS).get)
    assert len(group.read(ROWS)) == 4  # the group still works


def test_who_declares_nothing_is_not_asked(group):
    assert group.read_nothing(DataProto({"z": torch.zeros(2)})) is None


def test_answers_other_than_rows_are_checked_by_their_mode(group):
    assert group.measure(ROWS) == [2, 2]
    assert "'x'" in refusal(group.measure, ROWS.select(["mask"]))


def test_in_a_users_mode_it_counts_what_the_ranks_are_sent(group):
    assert group.of_doubled(ROWS) == [12, -1]
    before = group.num_calls()
    assert refusal(group.of_trebled, ROWS).startswith("readers.of_trebled (make_doubled+<lambda>): the method reads the column")
    assert group.num_calls() == before
    assert "rank 0 returned rows without the column 'y'" in refusal(group.without_y, ROWS)
