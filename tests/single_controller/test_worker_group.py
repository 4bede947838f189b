"""What a group looks like from the driver, on the inline runtime; what every runtime must do is in the contract suite."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import traceback
from typing import Any, cast

import pytest
import torch

from podium.cores import num_cores
from podium.errors import (
    ConfigError,
    DispatchError,
    GroupClosedError,
    RegistrationError,
    ResourceError,
    UnsupportedByRuntime,
    WorkerError,
)
from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    GroupFuture,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from podium.single_controller.processes.pending_call import PendingCall
from podium.single_controller.runtime.base import GroupSpec


class Inner(Worker):
    """A worker inside a worker, made late."""


class Probe(Worker):
    def __init__(self, scale: int = 1, *, answers: tuple[Any, ...] = ()) -> None:
        self.scale = scale
        self.answers = answers
        self.queries = 0
        self.lasting: list[int] = []

    @property
    def explosive(self) -> int:
        raise RuntimeError("looking for methods must not run properties")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self, x: int, /, y: int = 2) -> list[int]:
        """Say where, and what."""
        return [self.rank, x, y]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scaled(self, batch: DataProto, *, by: int = 1) -> DataProto:
        return DataProto({"x": batch.batch["x"] * self.scale * by})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scaled_later(self, batch: DataProto) -> DataProto:
        if (batch.batch["x"] < 0).any():
            raise ValueError("negative")
        return self.scaled(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scripted(self, batch: DataProto) -> Any:
        return self.answers[self.rank]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("m"))
    def on_mesh(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        self.queries += 1
        return self.rank, True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_queries(self) -> int:
        return self.queries

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inner_ranks(self) -> tuple[int, int]:
        return Inner().rank, Inner().world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def interrupt(self) -> None:
        raise KeyboardInterrupt

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def sum_later(self, number: int, values: torch.Tensor, more: Any = None) -> float:
        return number + float(values.sum()) + (float(more["y"].sum()) if more else 0.0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_later(self) -> int:
        return self.rank

    also_ping = ping

    def local(self) -> None: ...

    @classmethod
    def kind(cls, suffix: str = "") -> str:
        return cls.__name__ + suffix

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    partly = functools.partialmethod(ping, 7)


def group(num_ranks: int = 2, **init: Any) -> WorkerGroup[Probe]:
    return WorkerGroup(ResourcePool([num_ranks]), Init(Probe, **init), name="probes")


def rows(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values)})


# -- proxies ---------------------------------------------------------------------------------------------------------------


def test_a_proxy_has_the_methods_name_doc_and_signature():
    ping = group().ping
    assert type(ping).__name__ == "ping"
    assert ping.__doc__ == "Say where, and what."
    assert str(inspect.signature(ping)) == "(x: 'int', /, y: 'int' = 2) -> 'list[int]'"


def test_methods_are_found_by_name_and_by_call_and_listed():
    probes = group()
    assert probes.ping(1) == probes.call.ping(1) == [[0, 1, 2], [1, 1, 2]]
    assert {"ping", "scaled", "close"} <= set(dir(probes))


def test_a_bare_class_is_enough():
    assert WorkerGroup(ResourcePool([1]), Probe).ping(0) == [[0, 0, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda probes: probes.ping(), "ping.*missing a required argument: 'x'"),
        (lambda probes: probes.ping(x=1), "ping.*'x'"),
        (lambda probes: probes.scaled(rows(1), by=1, bye=2), "scaled.*unexpected keyword argument 'bye'"),
        (lambda probes: probes.scaled(rows(1), 2), "scaled.*too many positional"),
    ],
)
def test_arguments_are_checked_before_anything_is_sent(call: Any, message: str):
    with pytest.raises(TypeError, match=message):
        call(group())


def test_a_method_without_register_says_so():
    with pytest.raises(AttributeError, match=r"Probe\.local exists but is not registered; decorate it with @register"):
        _ = group().local


def test_an_override_without_register_is_not_callable():
    class Silent(Probe):
        def ping(self, x: int, /, y: int = 2) -> list[int]:  # type: ignore[override]
            return []

    with pytest.raises(AttributeError, match="not registered"):
        _ = WorkerGroup(ResourcePool([1]), Silent).ping


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(AttributeError, match="no method 'skaled'; did you mean 'scaled'"):
        _ = group().skaled


@pytest.mark.parametrize("name", ["close", "processes", "_methods", "spawn"])
def test_a_method_that_the_group_itself_has_is_refused(name: str):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def method(self: Worker) -> None: ...

    with pytest.raises(RegistrationError, match=f"Hides must not register {name}"):
        WorkerGroup(ResourcePool([1]), type("Hides", (Worker,), {name: method}))


def test_every_attribute_of_a_group_is_declared_so_that_no_method_hides_behind_one():
    assert vars(group()).keys() <= WorkerGroup.__annotations__.keys()


def test_a_method_under_a_second_name_is_one_of_the_group():
    probes = group()
    assert probes.also_ping(1) == probes.ping(1) == [[0, 1, 2], [1, 1, 2]]


def test_any_callable_member_is_called_by_its_name():
    probes = group()
    assert probes.execute_all_sync("kind", suffix="!") == ["Probe!", "Probe!"]
    assert probes.execute_all_sync("twice", 4) == [8, 8]
    assert probes.execute_all_sync("partly", 3) == [[0, 7, 3], [1, 7, 3]]
    assert probes.execute_rank_zero_sync("kind") == "Probe"
    with pytest.raises(AttributeError, match=r"Probe\.kind exists but is not registered"):
        _ = probes.kind
    with pytest.raises(AttributeError, match="has no method 'explosive'"):
        probes.execute_all("explosive")
    with pytest.raises(AttributeError, match="has no method 'kinds'; did you mean 'kind'"):
        probes.execute_all("kinds")


def test_copying_a_group_finds_no_method_too_early():
    assert copy.copy(group()).ping(1) == [[0, 1, 2], [1, 1, 2]]


# -- data ------------------------------------------------------------------------------------------------------------------


def test_a_users_mode_returns_no_padding_either():
    class Own(Worker):
        @register(dispatch_mode=get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO))
        def echo(self, batch: DataProto) -> DataProto:
            return batch

    with WorkerGroup(ResourcePool([4]), Own, auto_padding=True) as group:
        assert group.echo(DataProto({"x": torch.arange(5)})).batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_function_that_the_driver_brings_may_itself_take_an_argument_named_func():
    with WorkerGroup(ResourcePool([1]), Worker) as group:
        assert group.execute_func_rank_zero(lambda func: func + 1, func=3) == 4
        with pytest.raises(TypeError, match="func"):
            group.execute_with_func_generator(func=lambda worker, batch: batch, batch=DataProto({"x": torch.arange(2)}))


def test_keyword_only_calls_are_split_too():
    assert group(3, scale=2).scaled(by=5, batch=rows(0, 1, 2, 3)).batch["x"].tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((rows(1), None), r"probes\.scripted \(DP_COMPUTE_PROTO\): rank 1 returned NoneType, but must return a DataProto"),
        ((rows(1), 3), "rank 1 returned int"),
    ],
)
def test_results_that_cannot_be_joined_name_method_and_rank(answers: tuple[Any, ...], message: str):
    with pytest.raises(DispatchError, match=message):
        group(answers=answers).scripted(rows(1, 2))


def test_columns_that_differ_between_ranks_are_a_dispatch_error():
    with pytest.raises(DispatchError, match=r"probes\.scripted .*part 1 differs"):
        group(answers=(rows(1), DataProto({"y": torch.ones(1)}))).scripted(rows(1, 2))


def test_if_every_rank_returns_none_so_does_the_call():
    assert group(answers=(None, None)).scripted(rows(1, 2)) is None


def test_row_counts_that_differ_name_the_method():
    with pytest.raises(DispatchError, match=r"probes\.scaled .*must be a DataProto"):
        group().scaled(3)


def test_a_mesh_is_asked_for_once():
    probes = group(3)
    for _ in range(3):
        assert probes.on_mesh(rows(1, 2, 3, 4)).batch["x"].tolist() == [1, 2, 3, 4]
    assert probes.count_queries() == [1, 1, 1]


def test_a_mesh_that_no_rank_registered():
    class Meshless(Worker):
        def __init__(self) -> None:
            self._register_dispatch_collect_info("actor", 0, True)
            with pytest.raises(RegistrationError, match="'actor' already"):
                self._register_dispatch_collect_info("actor", 0, True)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("aktor"))
        def update(self, batch: DataProto) -> None: ...

    with pytest.raises(WorkerError, match="no mesh 'aktor'; did you mean 'actor'"):
        WorkerGroup(ResourcePool([1]), Meshless).update(rows(1))


def test_a_plain_class_is_in_no_mesh():
    class Plain:
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def update(self, batch: DataProto) -> DataProto:
            return batch

    with pytest.raises(DispatchError, match=r"Plain must be a subclass of Worker to be part of a mesh"):
        WorkerGroup(ResourcePool([1]), Plain).update(rows(1))


# -- futures ---------------------------------------------------------------------------------------------------------------


class Gated:
    """A call whose one answer is there when the gate opens."""

    method, silent_ranks, has_failed = "gated", (0,), False

    def __init__(self) -> None:
        self.gate = threading.Event()

    def is_over(self, wait_s: float = 0.0) -> bool:
        return self.gate.wait(wait_s)

    def finish(self) -> dict[int, Any]:
        assert self.gate.wait(20.0)
        return {0: 100}

    def future(self) -> GroupFuture[int]:
        return GroupFuture(cast(PendingCall, self), lambda answers: answers[0])


def test_a_deferred_call_has_the_arguments_at_the_time_of_the_call():
    probes, slow, x, more = group(), Gated(), torch.zeros(2), {"y": torch.zeros(1)}
    waiting = probes.sum_later(slow.future(), x, more=more)
    behind = probes.sum_later(1, x)
    x.add_(9)
    more["y"].add_(9)
    assert not waiting.done()
    slow.gate.set()
    assert (waiting.get(), behind.get()) == (100.0, 1.0)
    assert probes.sum_later(1, x).get() == 19.0


def test_a_deferred_call_refuses_arguments_that_cannot_be_copied():
    probes, slow = group(), Gated()
    with pytest.raises(DispatchError, match=r"probes.sum_later.*cannot be copied.*Call \.get\(\)"):
        probes.sum_later(slow.future(), threading.Lock())
    with pytest.raises(DispatchError, match="stays in the driver"):
        probes.sum_later(slow.future(), [slow.future()])
    assert probes.sum_later(1, torch.ones(1)).get() == 2.0


def test_calls_whose_references_were_taken_leave_nothing_behind():
    probes = group()
    for _ in range(5):
        assert [reference.get() for reference in probes.rank_later()] == [0, 1]
    assert len(probes.processes._in_flight) == 0


def test_a_list_of_futures_inside_another_argument_is_refused_like_any_future():
    probes = group()
    with pytest.raises(DispatchError, match=r"stays in the driver.*not inside a list or dict.*call \.get\(\) on it"):
        probes.execute_all("ping", {"ranks": probes.rank_later()})
    assert probes.rank_later().get() == [0, 1]


def test_a_future_gives_what_the_call_would():
    probes = group(scale=3)
    future = probes.scaled_later(rows(1, 2, 3))
    assert isinstance(future, GroupFuture)
    assert future.get().batch["x"].tolist() == future.get(timeout=1).batch["x"].tolist() == [3, 6, 9]
    assert future.done()


def test_a_future_raises_at_get_and_every_time():
    probes = group()
    future = probes.scaled_later(rows(1, -1))
    for _ in range(2):
        with pytest.raises(WorkerError, match="negative"):
            future.get()
    assert probes.ping(0)


# -- the inline runtime ----------------------------------------------------------------------------------------------------


def test_a_failure_leads_a_debugger_to_the_frame_that_failed():
    with pytest.raises(WorkerError) as caught:
        group().scaled_later(rows(1, -1)).get()
    original = caught.value.__cause__
    assert isinstance(original, ValueError)
    assert traceback.extract_tb(original.__traceback__)[-1].name == "scaled_later"


def test_ctrl_c_in_a_worker_passes_untouched():
    probes = group()
    with pytest.raises(KeyboardInterrupt):
        probes.interrupt()
    assert probes.ping(0)


def test_every_rank_runs_even_when_an_earlier_one_raises():
    class Counts(Worker):
        ran = 0

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fail(self) -> None:
            Counts.ran += 1
            raise ValueError(f"rank {self.rank}")

    with pytest.raises(WorkerError) as caught:
        WorkerGroup(ResourcePool([3]), Counts).fail()
    assert Counts.ran == 3
    assert caught.value.origin.rank == 0
    assert caught.value.consequences == ("rank 1: ValueError: rank 1", "rank 2: ValueError: rank 2")


def test_constructor_arguments_are_not_shared():
    class Writes(Worker):
        def __init__(self, values: list[int]) -> None:
            values.append(self.rank)
            self.values = values

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def read(self) -> list[int]:
            return self.values

    values = [7]
    assert WorkerGroup(ResourcePool([2]), Init(Writes, values)).read() == [[7, 0], [7, 1]]
    assert values == [7]


def test_peers_of_a_mesh_do_not_share_their_shard():
    class Peers(Worker):
        def __init__(self) -> None:
            self._register_dispatch_collect_info("tp", 0, self.rank == 1)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("tp"))
        def add(self, batch: DataProto) -> DataProto:
            batch.batch["x"] += 1
            return batch

    assert WorkerGroup(ResourcePool([3]), Peers).add(rows(1, 2)).batch["x"].tolist() == [2, 3]


def test_a_worker_made_inside_a_rank_is_that_rank():
    assert group(3).inner_ranks() == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_outside_any_group_is_a_group_of_one():
    probe = Probe(scale=3)
    assert (probe.rank, probe.world_size, probe.local_rank, probe.local_world_size) == (0, 1, 0, 1)
    assert probe.ping(5) == [0, 5, 2]


def test_wrong_arguments_are_refused_with_the_signature():
    class Notes(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def note(self, first: int, /, *, unit: str = "s", **metrics: int) -> int:
            return first + sum(metrics.values())

    notes = WorkerGroup(ResourcePool([1]), Notes)
    assert notes.note(1, step_7=7) == [8]
    for wrong in (lambda: notes.note(), lambda: notes.note(1, 2), lambda: notes.note(first=1)):
        assert notes.note(1, unit="ms") == [1]
        with pytest.raises(TypeError, match=r"note\(\): .*its signature is \(first: 'int', /"):
            wrong()


def test_threads_default_to_the_share_of_a_rank():
    class Threads(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def count(self) -> int:
            return torch.get_num_threads()

    assert WorkerGroup(ResourcePool([1]), Threads).count() == [num_cores()]
    assert WorkerGroup(ResourcePool([num_cores() * 2]), Threads).count()[0] == 1
    assert WorkerGroup(ResourcePool([1, 1]), Threads, threads_per_rank=3).count() == [3, 3]


# -- starting and ending ---------------------------------------------------------------------------------------------------


def test_a_closed_group_says_so():
    with group() as probes:
        ping = probes.ping
    with pytest.raises(GroupClosedError, match="'probes' cannot run 'ping': it was closed"):
        ping(1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Init(Probe, scael=2), TypeError, r"Probe\(\): got an unexpected keyword argument 'scael'"),
        (lambda: Init(cast(Any, len)), TypeError, "a group must be made of a class, got <built-in"),
        (lambda: Init(Inner, None, 3), TypeError, r"Inner\(\): too many positional"),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, runtime="rai"), ConfigError, "did you mean 'ray'"),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, threads_per_rank=-1), ResourceError, "threads_per_rank"),
        (lambda: WorkerGroup(cast(Any, 2), Probe), ConfigError, "the pool of a group must be a ResourcePool, got 2"),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, name=cast(Any, 3)), ConfigError, "name must be text, got 3"),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, threads_per_rank=cast(Any, "2")), ConfigError, "got '2'"),
        (
            lambda: WorkerGroup(ResourcePool([1]), Probe, call_timeout_s=cast(Any, "3")),
            ConfigError,
            "a time limit must be a number",
        ),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, runtime=cast(Any, ["ray"])), ConfigError, "the name of a runtime"),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, runtime="ray", call_timeout_s=0), ConfigError, "more than 0 seconds"),
        (lambda: WorkerGroup(ResourcePool([1]), Probe, call_timeout_s=3.0), UnsupportedByRuntime, "use runtime 'ray'"),
    ],
)
def test_a_group_that_cannot_be_made_says_why(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("ports", [(20000, 20000), (20001, 20000), (0, 70000), (0, 10), (60000, 65537), (-5, -1)])
def test_ports_that_there_are_not_are_refused_at_once(ports: tuple[int, int]):
    with pytest.raises(ConfigError, match=rf"master_port_range .*1 to 65535.*got \[{ports[0]}, {ports[1]}\)"):
        WorkerGroup(ResourcePool([1]), Probe, master_port_range=ports)


def test_the_last_port_is_one():
    assert GroupSpec("g", Probe, (), {}, ResourcePool([1]), master_port_range=(65535, 65536)).master_port_range == (65535, 65536)


def test_the_limit_of_the_start_is_a_setting():
    assert group().processes.spec.start_limit_s == 120.0
    assert WorkerGroup(ResourcePool([200]), Probe).processes.spec.start_limit_s == 200.0
    assert WorkerGroup(ResourcePool([1]), Probe, start_timeout_s=600.0).processes.spec.start_limit_s == 600.0
    with pytest.raises(ConfigError, match="start_timeout_s must be more than 0 seconds, got 0"):
        WorkerGroup(ResourcePool([1]), Probe, start_timeout_s=0)


# -- options that cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["no", 1, None, torch.tensor(True)])
def test_auto_padding_is_true_or_false(value: Any):
    with pytest.raises(
        ConfigError, match=f"auto_padding must be True or False, got {value!r}".replace("(", r"\(").replace(")", r"\)")
    ):
        WorkerGroup(ResourcePool([1]), Worker, auto_padding=value)


def test_a_closed_group_says_so_once():
    group = WorkerGroup(ResourcePool([1]), Worker, name="g")
    assert repr(group) == "<WorkerGroup 'g': 1 x Worker on 'inline', ready>"
    group.close()
    assert repr(group) == "<WorkerGroup 'g': 1 x Worker on 'inline', closed>"
