"""Routing as pure functions of a group's size and meshes: no runtime here."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch

from podium.errors import DataError, DispatchError, RegistrationError
from podium.protocol import DataProto, pad_dataproto_to_divisor
from podium.single_controller import (
    Copy,
    Dispatch,
    DispatchMode,
    Execute,
    Mesh,
    PerRank,
    collect_all_to_all,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from podium.single_controller.routing.dispatch import ROUTES, collect, dispatch, ranks_together, route_of
from podium.single_controller.routing.modes import InPlaceMode, UserMode


@dataclass
class TableOfMeshes:
    world_size: int
    meshes: dict[str | None, Mesh] = field(default_factory=dict)

    auto_padding: bool = False

    def mesh(self, name: str | None) -> Mesh:
        return self.meshes.get(name) or Mesh.flat(self.world_size)


def rows(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values, dtype=torch.int64)})


def row_lists(sent: object) -> list[list[int]]:
    assert isinstance(sent, PerRank)
    return [shard.batch["x"].tolist() for shard in sent.values]


def test_every_public_mode_is_in_the_table():
    modes = {name: mode for name, mode in vars(Dispatch).items() if isinstance(mode, DispatchMode)}
    assert set(modes.values()) == set(ROUTES) == set(Dispatch)
    assert all(name == mode.name for name, mode in modes.items())


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


def test_arguments_other_than_rows_are_copied():
    args, kwargs = route_of(Dispatch.DP_COMPUTE_PROTO).dispatch_fn(TableOfMeshes(2), rows(1, 2), [8, 9], ref=rows(3, 4))
    assert row_lists(args[0]) == [[1], [2]]
    assert args[1] == Copy([8, 9])
    assert row_lists(kwargs["ref"]) == [[3], [4]]


def test_row_counts_that_differ_name_both_arguments():
    with pytest.raises(DispatchError, match="argument 0 has 2 rows, argument 'ref' has 3"):
        route_of(Dispatch.DP_COMPUTE_PROTO).dispatch_fn(TableOfMeshes(2), rows(1, 2), ref=rows(1, 2, 3))


@pytest.mark.parametrize("args", [(), (5,), ([1, 2],)])
def test_a_batch_mode_without_a_batch_is_refused(args: tuple[object, ...]):
    with pytest.raises(DispatchError, match="must be a DataProto"):
        route_of(Dispatch.DP_COMPUTE_PROTO).dispatch_fn(TableOfMeshes(2), *args)


def test_mesh_rows_follow_dp_ranks_not_ranks():
    mesh = Mesh("m", dp_ranks=(1, 1, 0, 0), collects=(False, True, True, False))
    group, route = TableOfMeshes(4, {"m": mesh}), route_of(make_nd_compute_dataproto_dispatch_fn("m"))
    (sent,), _ = route.dispatch_fn(group, rows(0, 1, 2, 3, 4, 5))
    assert row_lists(sent) == [[3, 4, 5], [3, 4, 5], [0, 1, 2], [0, 1, 2]]
    assert route.collect_fn(group, [None, rows(3, 4, 5), rows(0, 1, 2), None]).batch["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_if_every_collecting_rank_returns_none_so_does_the_call():
    group = TableOfMeshes(2, {"m": Mesh("m", (0, 0), (True, False))})
    assert route_of(make_nd_compute_dataproto_dispatch_fn("m")).collect_fn(group, [None, None]) is None


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([rows(1), None], "rank 1 returned NoneType, but must return a DataProto"),
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


# -- lists and copies ----------------------------------------------------------------------------------------------------


def send(mode: DispatchMode, *args: Any, ranks: int = 3, execute: Execute = Execute.ALL, **kwargs: Any) -> Any:
    return dispatch(TableOfMeshes(ranks), route_of(mode), execute, args, kwargs)


def test_all_to_all_scatters_lists_and_copies_the_rest():
    args, kwargs = send(Dispatch.ALL_TO_ALL, [1, 2, 3], 5, "abc", Copy([7]), key=(4, 5, 6), none=None)
    assert args == (PerRank([1, 2, 3]), Copy(5), Copy("abc"), Copy([7]))
    assert kwargs == {"key": PerRank((4, 5, 6)), "none": Copy(None)}


@pytest.mark.parametrize("values", [[1, 2], (1, 2, 3, 4), [], PerRank([1, 2])])
def test_a_list_of_another_length_names_both_lengths(values: Any):
    count = len(values.values if isinstance(values, PerRank) else values)
    for mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE):
        with pytest.raises(DispatchError, match=f"argument 'key' must have one value per rank, got {count} values for 3 ranks"):
            send(mode, key=values)


@pytest.mark.parametrize("values", [torch.arange(4), range(4), "abcd", {0: 1, 1: 2, 2: 3}, 5, iter([1, 2, 3])])
def test_values_per_rank_are_counted_whatever_they_are_in(values: Any):
    with pytest.raises(DispatchError, match=r"argument 0 .* got 4 values for 3 ranks|argument 0 must be PerRank of"):
        send(Dispatch.ALL_TO_ALL, PerRank(values))
    with pytest.raises(DispatchError):
        send(Dispatch.ONE_TO_ALL, PerRank(values))


def test_dp_compute_takes_lists_and_tuples_alike_and_nothing_else_unsaid():
    assert send(Dispatch.DP_COMPUTE, [1, 2, 3], (4, 5, 6), Copy(7))[0] == (PerRank([1, 2, 3]), PerRank((4, 5, 6)), Copy(7))
    with pytest.raises(DispatchError, match="argument 0 must be a list with one value for each of the 3 ranks, got int"):
        send(Dispatch.DP_COMPUTE, 7)


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL, Dispatch.RANK_ZERO])
def test_rank_zero_gets_arguments_as_they_are(mode: DispatchMode):
    sent, _ = send(mode, 5, [1, 2, 3, 4], execute=Execute.RANK_ZERO)
    assert [value.for_rank(0) for value in sent] == [5, [1, 2, 3, 4]]
    assert collect(TableOfMeshes(3), route_of(mode), Execute.RANK_ZERO, {0: [9]}, ((), {})) == [9]
    assert send(mode, PerRank([7]), execute=Execute.RANK_ZERO)[0][0].for_rank(0) == 7
    assert send(mode, PerRank([7, 8, 9]), execute=Execute.RANK_ZERO)[0][0].for_rank(0) == 7
    with pytest.raises(DispatchError, match=r"argument 0 .* got 2 values for 3 ranks"):
        send(mode, PerRank([7, 8]), execute=Execute.RANK_ZERO)


def test_a_direct_method_is_refused_on_the_group():
    for execute in Execute:
        with pytest.raises(DispatchError, match=r"group\.workers\[rank\]"):
            send(Dispatch.DIRECT_ROLLOUT_METHOD, execute=execute)


# -- functions and rows --------------------------------------------------------------------------------------------------


def plus(worker: object, batch: DataProto, by: int = 1) -> DataProto:
    return DataProto({"x": batch.batch["x"] + by})


@pytest.mark.parametrize("function", [plus, partial(plus, by=2), lambda worker, batch: batch, torch.add, [].append])
def test_a_function_is_copied_and_the_rows_behind_it_are_split(function: Any):
    (sent, batch), _ = send(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, function, rows(1, 2, 3, 4))
    assert sent == Copy(function)
    assert row_lists(batch) == [[1, 2], [3], [4]]


@pytest.mark.parametrize("args", [(), (5,), (rows(1),)])
def test_without_a_function_first_it_says_so(args: tuple[Any, ...]):
    with pytest.raises(DispatchError, match="the first argument must be the function that the ranks run"):
        send(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, *args)


# -- padding -------------------------------------------------------------------------------------------------------------


def padded_call(batch: DataProto, ranks: int, answer: Any, mode: DispatchMode = Dispatch.DP_COMPUTE_PROTO) -> Any:
    group = TableOfMeshes(ranks, auto_padding=True)
    sent = dispatch(group, route_of(mode), Execute.ALL, (batch,), {})
    answers = {rank: answer(sent[0][0].for_rank(rank)) for rank in range(ranks)}
    return collect(group, route_of(mode), Execute.ALL, answers, sent)


@pytest.mark.parametrize(("num_rows", "ranks"), [(5, 4), (1, 4), (4, 4), (7, 3), (0, 3), (9, 2)])
def test_padding_makes_shards_equal_and_never_comes_back(num_rows: int, ranks: int):
    batch, sizes, masks = rows(*range(num_rows)), list[int](), list[int]()

    def double(shard: DataProto) -> DataProto:
        sizes.append(len(shard))
        masks.append(int(shard.padding_mask.sum()))
        return DataProto({"x": shard.batch["x"] * 2}, meta_info=shard.meta_info)

    result = padded_call(batch, ranks, double)
    assert result.batch["x"].tolist() == [2 * row for row in range(num_rows)]
    assert len(batch) == num_rows
    assert batch.meta_info == {}
    assert sizes == [-(-num_rows // ranks)] * ranks
    assert sum(masks) == (sum(sizes) - num_rows)
    assert not result.padding_mask.any()


def test_padding_is_trimmed_of_several_rows_for_each():
    result = padded_call(rows(0, 1, 2), 2, lambda shard: DataProto({"x": shard.batch["x"].repeat_interleave(3)}))
    assert result.batch["x"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    tiled = padded_call(rows(0, 1, 2), 2, lambda shard: shard.repeat(2, interleave=False))
    assert tiled.batch["x"].tolist() == [0, 1, 0, 1, 2, 2]


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize(("num_rows", "ranks"), [(7, 3), (5, 4), (1, 3)])
def test_padding_is_trimmed_of_several_rows_for_each_that_carry_the_shards_own_marks(num_rows: int, ranks: int, copies: int):
    def interleave(shard: DataProto) -> DataProto:
        return DataProto.from_dict({"x": shard.batch["x"].repeat_interleave(copies)}, meta_info=shard.meta_info)

    result = padded_call(rows(*range(num_rows)), ranks, interleave)
    assert result.batch["x"].tolist() == [row for row in range(num_rows) for _ in range(copies)]
    assert not result.padding_mask.any()


@pytest.mark.parametrize("returned", [1, 3, 5])
def test_padding_marks_copied_with_the_meta_are_ignored(returned: int):
    """A worker hands meta on to rows that it made itself: the marks speak of the shard's rows, not of these."""

    def made_by_hand(shard: DataProto) -> DataProto:
        return DataProto({"x": torch.arange(returned)}, meta_info=shard.meta_info)

    with pytest.raises(
        DispatchError, match=f"must return a multiple of the 2 rows that it was sent, 1 of them padding, got {returned}"
    ):
        padded_call(rows(0, 1, 2), 2, made_by_hand)


def test_marks_of_rows_taken_from_such_a_result_are_not_believed_either():
    def part_of_made_by_hand(shard: DataProto) -> DataProto:
        made = DataProto({"x": torch.arange(len(shard) * 3)}, meta_info=shard.meta_info)
        return made[: len(shard)]  # as long as the shard, whose marks would fit

    result = padded_call(rows(0, 1, 2), 2, part_of_made_by_hand)
    assert result.batch["x"].tolist() == [0, 1, 0]  # the last of each rank's is padding, by count


def test_a_result_that_knows_its_padding_is_trimmed_by_it():
    without_first = padded_call(rows(0, 1, 2), 2, lambda shard: shard.select_idxs(torch.arange(1, len(shard))))
    assert without_first.batch["x"].tolist() == [1]
    reversed_rows = padded_call(rows(0, 1, 2), 2, lambda shard: shard.select_idxs(torch.arange(len(shard) - 1, -1, -1)))
    assert reversed_rows.batch["x"].tolist() == [1, 0, 2]


@pytest.mark.parametrize("copies", [1, 2])
def test_padding_of_the_callers_own_stays_where_the_call_pads_too(copies: int):
    """Five rows padded to eight by the caller and to nine by the call: the ninth goes, whatever their order."""
    batch = pad_dataproto_to_divisor(rows(0, 1, 2, 3, 4), 8)[0]
    for turned in (batch, batch[[7, 0, 6, 1, 5, 2, 3, 4]]):
        result = padded_call(turned, 3, lambda shard: shard.repeat(copies))
        assert result.padding_mask.tolist() == turned.repeat(copies).padding_mask.tolist()
        assert result.batch["x"].tolist() == turned.repeat(copies).batch["x"].tolist()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_users_mode_that_cuts_rows_as_we_do_returns_no_padding(in_place: bool, monkeypatch: pytest.MonkeyPatch):
    pair = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    mode: DispatchMode = InPlaceMode("pair", **pair)
    if not in_place:
        monkeypatch.setattr(Dispatch, "_members", dict(Dispatch._members))
        monkeypatch.setattr("podium.single_controller.routing.dispatch.ROUTES", dict(ROUTES))
        mode = register_dispatch_mode("MINE", **pair)
    result = padded_call(rows(0, 1, 2, 3, 4), 4, lambda shard: shard, mode)
    assert result.batch["x"].tolist() == [0, 1, 2, 3, 4]
    others = padded_call(rows(0, 1, 2), 2, lambda shard: DataProto({"sum": shard.batch["x"].sum()[None]}), mode)
    assert others.batch["sum"].tolist() == [1, 4]  # one row each, which no padded row became: left alone


def test_rows_that_cannot_be_trimmed_name_the_rank():
    with pytest.raises(
        DispatchError, match="rank 1 must return a multiple of the 2 rows that it was sent, 1 of them padding, got 3"
    ):
        padded_call(rows(0, 1, 2), 2, lambda shard: DataProto({"x": torch.zeros(3)}))


def test_a_list_of_metrics_keeps_every_ranks_entry():
    assert padded_call(rows(0, 1, 2, 3, 4), 4, len, Dispatch.DP_COMPUTE_METRIC) == [2, 2, 2, 2]


def test_one_batch_that_asks_for_padding_pads_all_of_the_call():
    asks = DataProto.from_dict({"x": torch.arange(3)}, auto_padding=True)
    (first, second), _ = send(Dispatch.DP_COMPUTE_PROTO, rows(7, 8, 9), asks, ranks=2)
    assert row_lists(first) == [[7, 8], [9, 9]]
    assert row_lists(second) == [[0, 1], [2, 2]]


# -- modes of users ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_new_modes() -> Iterator[None]:
    members, routes = dict(Dispatch._members), dict(ROUTES)
    yield
    Dispatch._members.clear()
    Dispatch._members.update(members)
    ROUTES.clear()
    ROUTES.update(routes)


def reversed_ranks(group: Any, *args: Any, **kwargs: Any) -> Any:
    return tuple(list(value)[::-1] for value in args), kwargs


@pytest.mark.usefixtures("no_new_modes")
def test_a_registered_mode_is_a_member_and_can_be_updated_for_groups_that_exist():
    mode = register_dispatch_mode("backwards", reversed_ranks, lambda group, outputs: outputs[::-1])
    assert mode is cast(Any, Dispatch).BACKWARDS is Dispatch["BACKWARDS"] is Dispatch.from_name("backwards")
    assert (mode in Dispatch, "BACKWARDS" in Dispatch, "FORWARDS" in Dispatch) == (True, True, False)
    assert send(mode, [1, 2, 3])[0] == (PerRank([3, 2, 1]),)
    assert collect(TableOfMeshes(2), route_of(mode), Execute.ALL, {0: "a", 1: "b"}, ((), {})) == ["b", "a"]
    update_dispatch_mode(mode, reversed_ranks, lambda group, outputs: "new")
    assert collect(TableOfMeshes(2), route_of(mode), Execute.ALL, {0: "a", 1: "b"}, ((), {})) == "new"
    with pytest.raises(RegistrationError, match="'BACKWARDS' exists already; update_dispatch_mode"):
        register_dispatch_mode("BACKWARDS", reversed_ranks, collect_all_to_all)
    with pytest.raises(RegistrationError, match="must be an identifier without a leading underscore"):
        register_dispatch_mode("no good", reversed_ranks, collect_all_to_all)
    with pytest.raises(RegistrationError, match="collect_fn of a dispatch mode must be a function, got None"):
        register_dispatch_mode("HALF", reversed_ranks, cast(Any, None))
    assert "HALF" not in Dispatch
    with pytest.raises(RegistrationError, match="a member of Dispatch, got 'ONE_TO_ALL'"):
        update_dispatch_mode(cast(Any, "ONE_TO_ALL"), reversed_ranks, collect_all_to_all)


@pytest.mark.parametrize("name", [None, 3, b"MINE", ["MINE"], "", "no good", "_mine"])
def test_invalid_names_of_modes_are_refused(name: Any):
    with pytest.raises(
        RegistrationError, match=f"must be an identifier without a leading underscore, got {re.escape(repr(name))}"
    ):
        register_dispatch_mode(name, reversed_ranks, collect_all_to_all)


@pytest.mark.parametrize("name", [None, 3, [], "", b"actor"])
def test_invalid_names_of_meshes_are_refused(name: Any):
    with pytest.raises(RegistrationError, match=f"the name of a mesh must be a string, .*, got {re.escape(repr(name))};"):
        make_nd_compute_dataproto_dispatch_fn(name)


def test_a_mode_that_this_process_does_not_know_loads_and_cannot_be_called():
    known, unknown = pickle.loads(pickle.dumps((Dispatch.ONE_TO_ALL, UserMode("ELSEWHERE"))))
    assert known is Dispatch.ONE_TO_ALL
    assert unknown == UserMode("ELSEWHERE")
    with pytest.raises(RegistrationError, match="unknown dispatch mode 'ELSEWHERE'"):
        send(unknown)
    with pytest.raises(RegistrationError, match="unknown dispatch mode 'ELSEWHERE'"):
        update_dispatch_mode(unknown, reversed_ranks, collect_all_to_all)


@pytest.mark.parametrize("returned", [None, ([1],), ([1], {}, 3), (1, [2])])
def test_a_dispatch_function_must_return_args_and_kwargs(returned: Any):
    mode = InPlaceMode("mine", lambda group, *args, **kwargs: returned, collect_all_to_all)
    with pytest.raises(DispatchError, match="a dispatch_fn must return"):
        send(mode, 1)


def test_a_dispatch_function_may_say_a_value_per_rank_a_copy_or_nothing():
    def mixed(group: Any, *args: Any, **kwargs: Any) -> Any:
        return [list(range(group.world_size)), Copy([1]), 5], {"key": PerRank("abc")}

    args, kwargs = send(InPlaceMode("mixed", mixed, collect_all_to_all))
    assert [value.for_rank(1) for value in args] == [1, [1], 5]
    assert kwargs["key"].for_rank(1) == "b"


# -- which ranks share their arguments -------------------------------------------------------------------------------------


def test_ranks_that_are_sent_only_copies_share_one_call():
    assert ranks_together(((Copy(1),), {"x": Copy([2])}), range(3)) == [range(3)]
    assert ranks_together(((), {}), range(3)) == [range(3)]


def test_ranks_of_one_shard_share_their_call():
    group = TableOfMeshes(4, {"model": Mesh("model", (0, 1, 0, 1), (True, True, False, False))})
    route = route_of(make_nd_compute_dataproto_dispatch_fn("model"))
    sent = dispatch(group, route, Execute.ALL, (rows(0, 1, 2, 3), 7), {})
    assert ranks_together(sent, range(4)) == [[0, 2], [1, 3]]


def test_ranks_with_values_of_their_own_share_nothing():
    assert ranks_together(((Copy(1), PerRank(["a", "a"])), {}), range(2)) == [[0], [1]]
