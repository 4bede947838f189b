"""Routing as pure functions of a group's size and meshes: no runtime here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from podium.errors import DataError, DispatchError, RegistrationError
from podium.protocol import DataProto
from podium.single_controller import Copy, Dispatch, DispatchMode, Mesh, PerRank, make_nd_compute_dataproto_dispatch_fn
from podium.single_controller.dispatch import ROUTES, route_of


@dataclass
class TableOfMeshes:
    world_size: int
    meshes: dict[str | None, Mesh] = field(default_factory=dict)

    def mesh(self, name: str | None) -> Mesh:
        return self.meshes.get(name) or Mesh.flat(self.world_size)


def rows(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values, dtype=torch.int64)})


def row_lists(sent: object) -> list[list[int]]:
    assert isinstance(sent, PerRank)
    return [shard.batch["x"].tolist() for shard in sent.values]


def test_every_public_mode_is_in_the_table():
    modes = {name: mode for name, mode in vars(Dispatch).items() if isinstance(mode, DispatchMode)}
    assert {name: mode.name for name, mode in modes.items()} == {name: name for name in ROUTES}


def test_unknown_mode_names_the_nearest():
    with pytest.raises(RegistrationError, match="did you mean 'ONE_TO_ALL'"):
        route_of(DispatchMode("ONE_TO_AL"))


def test_one_to_all_copies_even_a_list_as_long_as_the_group():
    group = TableOfMeshes(2)
    route = route_of(Dispatch.ONE_TO_ALL)
    assert route.dispatch_fn(group, [1, 2], key=(3, 4)) == ((Copy([1, 2]),), {"key": Copy((3, 4))})
    assert route.collect_fn(group, ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "sizes"),
    [(7, 3, [3, 2, 2]), (1, 4, [1, 0, 0, 0]), (5, 4, [2, 1, 1, 1]), (0, 3, [0, 0, 0]), (6, 2, [3, 3])],
)
def test_uneven_rows_are_all_sent_once_and_come_back(num_rows: int, num_ranks: int, sizes: list[int]):
    group, route = TableOfMeshes(num_ranks), route_of(Dispatch.DP_COMPUTE_PROTO)
    (sent,), _ = route.dispatch_fn(group, rows(*range(num_rows)))
    assert [len(shard) for shard in row_lists(sent)] == sizes
    result = route.collect_fn(group, sent.values)
    assert result.batch["x"].tolist() == list(range(num_rows))
    assert result.batch["x"].dtype == torch.int64


def test_what_is_no_batch_is_copied_beside_a_batch():
    args, kwargs = route_of(Dispatch.DP_COMPUTE_PROTO).dispatch_fn(TableOfMeshes(2), rows(1, 2), [8, 9], ref=rows(3, 4))
    assert row_lists(args[0]) == [[1], [2]]
    assert args[1] == Copy([8, 9])
    assert row_lists(kwargs["ref"]) == [[3], [4]]


def test_row_counts_that_differ_name_both_arguments():
    with pytest.raises(DispatchError, match="argument 0 has 2 rows, argument 'ref' has 3"):
        route_of(Dispatch.DP_COMPUTE_PROTO).dispatch_fn(TableOfMeshes(2), rows(1, 2), ref=rows(1, 2, 3))


@pytest.mark.parametrize("args", [(), (5,), ([1, 2],)])
def test_a_batch_mode_without_a_batch_is_refused(args: tuple[object, ...]):
    with pytest.raises(DispatchError, match="needs a DataProto"):
        route_of(Dispatch.DP_COMPUTE_PROTO).dispatch_fn(TableOfMeshes(2), *args)


def test_mesh_rows_follow_dp_ranks_not_ranks():
    mesh = Mesh("m", dp_ranks=(1, 1, 0, 0), collects=(False, True, True, False))
    group, route = TableOfMeshes(4, {"m": mesh}), route_of(make_nd_compute_dataproto_dispatch_fn("m"))
    (sent,), _ = route.dispatch_fn(group, rows(0, 1, 2, 3, 4, 5))
    assert row_lists(sent) == [[3, 4, 5], [3, 4, 5], [0, 1, 2], [0, 1, 2]]
    assert route.collect_fn(group, [None, rows(3, 4, 5), rows(0, 1, 2), None]).batch["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_none_from_every_collecting_rank_is_none():
    group = TableOfMeshes(2, {"m": Mesh("m", (0, 0), (True, False))})
    assert route_of(make_nd_compute_dataproto_dispatch_fn("m")).collect_fn(group, [None, None]) is None


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([rows(1), None], "rank 1 returned NoneType, expected DataProto"),
        ([None, rows(1)], "rank 0 returned NoneType"),
        ([rows(1), "text"], "rank 1 returned str"),
        ([0.5, 0.5], "rank 0 returned float"),
    ],
)
def test_results_of_another_type_name_the_rank(outputs: list[object], message: str):
    with pytest.raises(DispatchError, match=message):
        route_of(Dispatch.DP_COMPUTE_PROTO).collect_fn(TableOfMeshes(2), outputs)


def test_results_with_other_columns_are_refused():
    with pytest.raises(DataError, match="part 1 differs"):
        route_of(Dispatch.DP_COMPUTE_PROTO).collect_fn(TableOfMeshes(2), [rows(1), DataProto({"y": torch.ones(1)})])
