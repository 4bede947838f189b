"""What careless or hostile code does with rows that stay: names that are ours, modes of its own, other kinds of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.errors import DataError, WorkerError
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.jagged import parts
from podium.single_controller import (
    DataProtoFuture,
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    recorded_traffic,
    register,
    update_dispatch_mode,
)
from podium.single_controller.routing.dispatch import dispatch_dp_compute_data_proto, get_predefined_dispatch_fn

WIDE = 32 * 1024
"""Values of a row of a column that stays."""


@dataclass
class Holder:
    """An object of which only a look inside tells how large it is."""

    values: Tensor


class Maker(Worker):
    """Makes rows by value, by reference and later; gives back what it was given."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def value(self, rows: DataProto) -> DataProto:
        return made(rows)

    @register(Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def stays(self, rows: DataProto) -> DataProto:
        return made(rows)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, rows: DataProto) -> DataProto:
        return made(rows)

    @register(Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def named(self, rows: DataProto, name: str, width: int) -> DataProto:
        return DataProto({name: torch.zeros(len(rows), width), "x": rows.batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def objects(self, rows: DataProto, held: str) -> DataProto:
        values = [torch.zeros(1, WIDE) for _ in rows]
        return DataProto({}, {"o": [DataProto({"w": value}) if held == "rows" else Holder(value) for value in values]})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, rows: DataProto) -> DataProto:
        return rows

    @register(Dispatch.DP_COMPUTE_METRIC)
    def overwrite(self, rows: DataProto) -> None:
        rows.batch["wide"].fill_(-1)
        parts(rows.batch["tokens"])[0].fill_(-1)


def made(rows: DataProto) -> DataProto:
    numbers: list[int] = rows.batch["x"].tolist()
    wide = rows.batch["x"].float()[:, None].expand(-1, WIDE).contiguous()
    tokens = jagged_from_rows([torch.arange(n + 1) for n in numbers])
    long = ["x" * 3 * WIDE for _ in numbers]
    return DataProto(
        {"x": rows.batch["x"], "wide": wide, "tokens": tokens}, {"name": [f"row {n}" for n in numbers], "long": long}
    )


@pytest.fixture(scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.slow)])
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup[Any]]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with WorkerGroup(ResourcePool([2]), Init(Maker), runtime=request.param, threads_per_rank=1) as started:
        yield started


def rows(count: int) -> DataProto:
    return DataProto({"x": torch.arange(count)})


@pytest.mark.parametrize("name", ["<numbers 0>", "<lengths 1>", "<numbers of mine>"])
def test_a_column_with_a_name_of_ours_is_refused_and_not_lost(group: WorkerGroup[Any], name: str):
    for width in (1, WIDE):
        with pytest.raises(WorkerError, match="must not begin with one of"):
            group.named(rows(4), name, width)
    stays = group.stays(rows(4))
    with pytest.raises(DataError, match="must not begin with one of"):
        stays.union(DataProto({name: torch.arange(4)}))
    for column in ("x", "wide"):
        with pytest.raises(DataError, match="must not begin with one of"):
            stays.rename(column, name)
    assert group.named(rows(4), name[1:], 1).column_names() == {name[1:], "x"}


def test_a_column_name_that_is_not_text_is_refused(group: WorkerGroup[Any]):
    for width in (1, WIDE):
        with pytest.raises(WorkerError, match="column name 1 must be a str, since the rows stay where they were made, got int"):
            group.named(rows(4), 1, width)
    with pytest.raises(DataError, match="column name 2 must be a str, since the rows stay where they were made, got int"):
        group.stays(rows(4)).rename(["x"], [2])  # type: ignore[list-item]
    with pytest.raises(
        DataError, match=r"column name \('a', 'b'\) must be a str, since the rows stay where they were made, got tuple"
    ):
        group.stays(rows(4)).union(DataProto({}, {("a", "b"): [0, 1, 2, 3]}))  # type: ignore[dict-item]


def test_objects_that_hold_rows_or_tensors_stay_as_columns_of_them_would(group: WorkerGroup[Any]):
    for held in ("rows", "dataclass"):
        with recorded_traffic() as traffic:
            stays = group.objects(rows(4), held)
        assert traffic.counted()["objects", "stayed", "o"] == 4 * 4 * WIDE
        assert [type(value) for value in stays.get().non_tensor_batch["o"]] == [DataProto if held == "rows" else Holder] * 4


def test_no_name_becomes_that_of_two_columns(group: WorkerGroup[Any]):
    stays = group.stays(rows(4))
    for column in ("x", "wide"):
        for name in ("name", "long"):
            with pytest.raises(DataError, match=f"object column '{name}' exists already"):
                stays.rename(column, name)
    with pytest.raises(DataError, match="'name' has tensors in one batch and objects in the other"):
        stays.union(DataProto({"name": torch.arange(4)}))
    with pytest.raises(DataError, match="'x' has tensors in one batch and objects in the other"):
        stays.union(DataProto({}, {"x": list("abcd")}))
    assert stays.rename(["x", "wide"], ["wide", "x"]).get().batch["wide"].tolist() == [0, 1, 2, 3]


def test_rows_of_this_process_are_joined_with_those_elsewhere(group: WorkerGroup[Any]):
    stays, value = group.stays(rows(4)), group.value(rows(4))
    joined = DataProtoFuture.concat([stays, value])
    value.batch["wide"].fill_(-1)
    assert joined.get(keys=["wide"]).batch["wide"][:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(DataError, match="a DataProtoFuture, a DataProto or a TensorDict, got list"):
        DataProtoFuture.concat([stays, [1]])  # type: ignore[list-item]
    with pytest.raises(DataError, match="a DataProtoFuture, a DataProto or a TensorDict, got NoneType"):
        stays.union(None)


def test_a_tensordict_is_joined_too(group: WorkerGroup[Any]):
    pytest.importorskip("tensordict")
    reward = DataProto({"reward": torch.arange(4)}).to_tensordict()
    stays = group.stays(rows(4))
    assert stays.union(reward).get(keys=["reward"]).batch["reward"].tolist() == [0, 1, 2, 3]
    assert len(DataProtoFuture.concat([stays.select(["x"], []), rows(3).to_tensordict()])) == 7


def test_an_updated_mode_gets_rows_that_it_knows_and_may_write(group: WorkerGroup[Any]):
    given: list[type] = []
    before = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)

    def split(ranks: Any, batch: Any) -> Any:
        given.append(type(batch))
        return dispatch_dp_compute_data_proto(ranks, batch)

    def listed(ranks: Any, outputs: Sequence[Any]) -> list[Any]:
        return list(outputs)

    stays = group.stays(rows(4))
    update_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, split, listed)
    try:
        found = [group.echo(stays), group.value(rows(4)), group.later(rows(4)).get(), group.stays(rows(4)).get()]
    finally:
        update_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, before["dispatch_fn"], before["collect_fn"])
    assert set(given) == {DataProto}
    for outputs in found:
        assert [type(part) for part in outputs] == [DataProto, DataProto]
        for part in outputs:
            for column in (part.batch["wide"], parts(part.batch["tokens"])[0]):
                assert type(column) is Tensor
                column.zero_()
    assert isinstance(group.later(rows(4)), DataProtoFuture)  # put back
    assert stays.get(keys=["wide"]).batch["wide"][:, 0].tolist() == [0, 1, 2, 3]


def test_a_worker_that_overwrites_its_rows_does_not_change_those_that_stay(group: WorkerGroup[Any]):
    stays = group.stays(rows(4))
    group.overwrite(stays)
    found, expected = stays.get(), made(rows(4))
    assert torch.equal(found.batch["wide"], expected.batch["wide"])
    assert torch.equal(parts(found.batch["tokens"])[0], parts(expected.batch["tokens"])[0])


def test_results_that_are_arguments_are_the_drivers_own(group: WorkerGroup[Any]):
    stays, value = group.stays(rows(4)), group.value(rows(4))
    for given in (stays, value, stays[:1], value[:1]):
        found = group.echo(given)
        for column in (found.batch["x"], found.batch["wide"], parts(found.batch["tokens"])[0]):
            column.fill_(-1)
    assert torch.equal(value.batch["wide"], made(rows(4)).batch["wide"])
    assert torch.equal(stays.get(keys=["wide"]).batch["wide"], value.batch["wide"])
