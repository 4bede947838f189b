"""Calls on Ray: their order on actors of both kinds, and the types of their results."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numpy.typing import NDArray

from podium.errors import CallTimeoutError, ConfigError, DispatchError, Origin, WorkerError, WorkerLostError
from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    Init,
    PerRank,
    ResourcePool,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from podium.single_controller.rank.context import current_context
from podium.single_controller.runtime.sequencing import OWNER, CallSequencer, SequenceGate, SequenceNumber

pytestmark = pytest.mark.usefixtures("ray_cluster")
LARGE = 100_000


class CannotBeRead:
    """It can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return CannotBeRead._rebuild, (1,)

    @staticmethod
    def _rebuild(number: int) -> None:
        raise KeyError("gone")


class NeedsTwoError(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class BadMessageError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message either")


OF_ANOTHER = WorkerLostError(Origin("inner", "f", 7, "n", 1), cause_type="ProcessDied", cause_message="gone", remote_traceback="")


class Greeter:
    def greet(self) -> str:
        return "hello"


class Log(Worker):
    def __init__(self) -> None:
        self.log: list[int] = []

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def put(self, number: int, padding: object = None) -> int:
        self.log.append(number)
        return number

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def mark(self) -> None:
        self.log.append(-1)

    @register(Dispatch.ONE_TO_ALL)
    def look(self) -> list[int]:
        found, self.log = self.log, []
        return found

    @register(Dispatch.ONE_TO_ALL)
    def give(self, value: object) -> object:
        return value

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def give_later(self, value: object) -> object:
        return value

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def ones(self, count: int) -> NDArray[np.float64]:
        return np.ones(count)

    @register(Dispatch.ONE_TO_ALL)
    def write(self, array: NDArray[np.float64], value: object) -> float:
        array[0] = 9
        return float(array.sum())

    @register(Dispatch.ONE_TO_ALL)
    def unreadable(self) -> object:
        return CannotBeRead()

    @register(Dispatch.ONE_TO_ALL)
    def raise_it(self, kind: str) -> None:
        raise {"two": NeedsTwoError(1, 2), "message": BadMessageError(), "end": StopIteration("no more"), "other": OF_ANOTHER}[
            kind
        ]

    @register(Dispatch.ONE_TO_ALL)
    def with_reference(self) -> dict[str, Any]:
        return {"reference": ray.put(1), "array": np.zeros(LARGE), "tensor": torch.ones(2, requires_grad=True) * 2}

    @register(Dispatch.ONE_TO_ALL)
    def make_actor(self) -> Any:
        return ray.remote(num_cpus=0)(Greeter).remote()

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, actor: Any) -> None:
        self.kept = actor

    @register(Dispatch.ONE_TO_ALL)
    def use(self) -> str:
        return ray.get(self.kept.greet.remote())  # type: ignore[no-any-return]

    @register(Dispatch.ONE_TO_ALL)
    def lose_actor(self) -> None:
        ray.kill(self.kept)
        self.use()


class AsyncLog(Log):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def put_async(self, number: int, padding: object = None) -> int:
        self.log.append(number)
        await asyncio.sleep(0)
        return number


@pytest.fixture(scope="module", params=[Log, AsyncLog])
def group(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[WorkerGroup[Log]]:
    with WorkerGroup(ResourcePool([2]), Init(request.param), runtime="ray") as made:
        yield made


def test_calls_of_every_size_start_in_the_order_they_were_made(group: WorkerGroup[Log]):
    for turn in range(10):
        for number in range(20):
            if number % 4 == 0:
                group.call.mark()
            padding = [None, torch.zeros(8), torch.zeros(LARGE), b"x" * LARGE][number % 4]
            group.call.put(number, padding)
        expected = [entry for number in range(20) for entry in ([-1] if number % 4 == 0 else []) + [number]]
        assert group.call.look() == [expected] * 2, f"turn {turn}"


def test_a_blocking_call_does_not_overtake(group: WorkerGroup[Log]):
    for number in range(30):
        group.call.put(number, torch.zeros(LARGE))
        assert group.call.look() == [[number]] * 2


def test_coroutine_methods_start_in_the_same_line():
    with WorkerGroup(ResourcePool([2]), AsyncLog, runtime="ray") as group:
        for _ in range(10):
            for number in range(20):
                (group.call.put_async if number % 3 else group.call.put)(number, torch.zeros(LARGE) if number % 2 else None)
            logs = group.call.look()
            assert [[number for number in log if number % 3 == 0] for log in logs] == [list(range(0, 20, 3))] * 2
            assert [[number for number in log if number % 3] for log in logs] == [[n for n in range(20) if n % 3]] * 2


def test_a_reference_waits_for_its_turn_and_delays_no_other_call(group: WorkerGroup[Log]):
    reference = ray.put(3)
    group.call.put(1)
    put = group.execute_all("put", PerRank([reference, reference]))
    looked = group.call.look()
    assert group.call.give(5) == [5, 5]
    assert ray.get(list(put)) == [3, 3]
    assert [sorted(before + after) for before, after in zip(looked, group.call.look(), strict=True)] == [[1, 3]] * 2


@pytest.mark.parametrize("value", [b"abc", pickle.dumps({"a": 1}), b"buffers:", "text", 7, None, [1], np.arange(3)])
def test_results_are_what_the_worker_returned(group: WorkerGroup[Log], value: Any):
    for results in (group.call.give(value), group.call.give_later(value).get(), ray.get(list(group.call.give_later(value)))):
        for result in results:
            assert type(result) is type(value)
            assert np.array_equal(result, value) if isinstance(value, np.ndarray) else result == value


def test_a_non_blocking_result_and_an_argument_beside_a_reference_are_writable(group: WorkerGroup[Log]):
    for array in group.call.ones(LARGE).get():
        array[0] = 5
    assert group.call.write(np.ones(LARGE), ray.put(1)) == [LARGE + 8.0] * 2


def test_a_result_beside_a_reference_is_writable_and_detached(group: WorkerGroup[Log]):
    for result in group.call.with_reference():
        result["array"][0] = 5
        assert (result["tensor"].tolist(), result["tensor"].requires_grad) == ([2.0, 2.0], False)
        assert ray.get(result["reference"]) == 1


@pytest.mark.slow
def test_actors_live_as_long_as_a_rank_or_the_driver_has_them(group: WorkerGroup[Log]):
    """Ray counts the handles of an actor, and ends one without handles."""
    made = group.call.make_actor()
    group.call.keep(ray.remote(num_cpus=0)(Greeter).remote())
    time.sleep(2)  # what is not counted is ended by then
    assert ray.get([actor.greet.remote() for actor in made]) == ["hello"] * 2
    assert group.call.use() == ["hello"] * 2


def test_the_death_of_another_actor_is_not_the_ranks_own(group: WorkerGroup[Log]):
    group.call.keep(group.call.make_actor()[0])
    with pytest.raises(WorkerError, match="ActorDiedError") as caught:
        group.call.lose_actor()
    assert not isinstance(caught.value, WorkerLostError)
    assert caught.value.origin.method == "lose_actor"
    assert group.call.give(1) == [1, 1]


def test_what_cannot_be_sent_to_one_rank_is_sent_to_none(group: WorkerGroup[Log]):
    with pytest.raises(DispatchError, match=r"argument 0 \(lock\) of 'put' cannot be sent to rank 1"):
        group.execute_all("put", PerRank([1, threading.Lock()]))
    with pytest.raises(DispatchError, match=r"argument 0 \(lock\) of 'put' cannot be sent to ranks 0-1"):
        group.execute_all("put", threading.Lock())
    assert group.call.look() == [[], []]


def test_a_result_that_cannot_be_read_names_its_rank(group: WorkerGroup[Log]):
    with pytest.raises(WorkerError, match="result could not be read here: KeyError: 'gone'") as caught:
        group.call.unreadable()
    assert (caught.value.origin.rank, caught.value.origin.method) == (0, "unreadable")
    assert group.status().calls == ()
    assert group.call.give(1) == [1, 1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("two", "NeedsTwoError"), ("message", "BadMessageError"), ("end", "StopIteration"), ("other", "WorkerLostError")],
)
def test_exceptions_that_cannot_be_pickled_are_reported(group: WorkerGroup[Log], kind: str, name: str):
    with pytest.raises(WorkerError) as caught:
        group.call.raise_it(kind)
    assert caught.value.cause_type == name
    assert "in raise_it" in caught.value.remote_traceback
    assert (caught.value.origin.group, caught.value.origin.method) == (group.name, "raise_it")
    assert group.call.give(1) == [1, 1]


# -- sequencing alone -------------------------------------------------------------------------------------------------------


def test_a_call_that_is_alone_needs_no_number():
    sequencer = CallSequencer(OWNER)
    assert sequencer.number(0, counts=True) is None
    assert sequencer.number(0, counts=True) == SequenceNumber(OWNER, 1, True)
    assert sequencer.number(1, counts=True) is None
    sequencer.answered([0, 0])
    assert sequencer.number(0, counts=True) is None
    assert sequencer.number(1, counts=False) == SequenceNumber(OWNER, 1, False)
    assert CallSequencer("other").number(0, counts=True) == SequenceNumber("other", 0, True)


def test_calls_start_in_the_order_sent_whichever_arrives_first():
    started: list[object] = []

    async def call(gate: SequenceGate, name: object, number: SequenceNumber | None) -> None:
        await gate.wait_turn(number)
        started.append(name)

    async def arrive() -> None:
        gate = SequenceGate()
        late = [call(gate, n, SequenceNumber(OWNER, n, True)) for n in (3, 1, 2)]
        held = call(gate, "held", SequenceNumber(OWNER, 2, False))
        other = call(gate, "other", SequenceNumber("b", 0, True))
        tasks = [asyncio.ensure_future(one) for one in [*late, held, other]]
        await asyncio.sleep(0.01)
        await call(gate, 0, None)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    asyncio.run(arrive())
    assert started[:2] == ["other", 0]
    assert [name for name in started if isinstance(name, int)] == [0, 1, 2, 3]
    assert started.index("held") > started.index(1)


# -- what ends or confuses a process --------------------------------------------------------------------------------------


class Bad(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def leave(self, kind: str) -> None:
        raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "cancel": asyncio.CancelledError()}[kind]

    @register(Dispatch.ONE_TO_ALL)
    def surrogate(self) -> None:
        raise ValueError("half a character: \ud800")

    @register(Dispatch.ONE_TO_ALL)
    def five(self) -> int:
        return 5


class AsyncBad(Bad):
    @register(Dispatch.ONE_TO_ALL)
    async def leave_async(self, kind: str) -> None:
        Bad.leave(self, kind)


@dataclass
class Shown(Worker):
    """Its representation needs what its constructor sets, and Ray asks for it before."""

    number: int

    @register(Dispatch.ONE_TO_ALL)
    def shown(self) -> str:
        return repr(self)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (AsyncBad, "leave"),
        pytest.param(Bad, "leave", marks=pytest.mark.slow),
        pytest.param(AsyncBad, "leave_async", marks=pytest.mark.slow),
    ],
)
def test_a_base_exception_is_reported_and_hangs_no_call(cls: type[Bad], method: str):
    with WorkerGroup(ResourcePool([1]), cls, runtime="ray", call_timeout_s=60) as group:
        for kind, name in (("interrupt", "KeyboardInterrupt"), ("cancel", "CancelledError")):
            with pytest.raises(WorkerError) as caught:
                getattr(group, method)(kind)
            assert caught.value.cause_type == name
            assert group.call.five() == [5]
        with pytest.raises(WorkerError, match=r"half a character: .*ud800"):
            group.call.surrogate()
        assert group.call.five() == [5]
        with pytest.raises(WorkerLostError):
            getattr(group, method)("exit")


class Ended(AsyncBad):
    def __init__(self) -> None:
        next(iter(()))


@pytest.mark.slow
def test_a_constructor_that_meets_an_iterators_end_fails_the_groups_creation():
    with pytest.raises(WorkerError, match="StopIteration") as caught:
        WorkerGroup(ResourcePool([1]), Ended, runtime="ray", call_timeout_s=60)
    assert caught.value.origin.method == "__init__"


def hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return plain


class Waiting(Worker):
    def __init__(self, given: object = None) -> None:
        self.given = given
        self._register_dispatch_collect_info("mine", self.rank, True)
        self._register_dispatch_collect_info("doubled", 0, True)

    @register(Dispatch.ONE_TO_ALL)
    async def begin(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        asyncio.get_running_loop().call_later(0.3, self.queue.put_nowait, 5)

    @register(Dispatch.ONE_TO_ALL)
    @hidden
    async def take(self) -> int:
        return await self.queue.get()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(make_nd_compute_dataproto_dispatch_fn("mine"))
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(make_nd_compute_dataproto_dispatch_fn("doubled"))
    def misrouted(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def read(self) -> object:
        given: Any = self.given
        return ray.get(given["reference"]), ray.get(given["actor"].greet.remote())


def test_a_coroutine_that_a_decorator_hides_runs_on_the_loop_of_the_others():
    with WorkerGroup(ResourcePool([1]), Waiting, runtime="ray", call_timeout_s=60) as group:
        group.call.begin()
        assert group.call.take() == [5]


@pytest.mark.slow
def test_the_limit_of_a_call_holds_where_its_mesh_is_not_known_yet():
    batch = DataProto({"x": torch.arange(2)})
    with WorkerGroup(ResourcePool([2]), Waiting, runtime="ray") as group:
        napping, began = group.call.nap(20), time.monotonic()
        with pytest.raises(CallTimeoutError, match="within 1 s"):
            group.echo.options(timeout=1)(batch)
        assert time.monotonic() - began < 15
        with pytest.raises(WorkerLostError, match="broken before this was read: method '_query_mesh' timed out after 1 s"):
            napping.get()
        group.restart()
        assert group.echo.options(timeout=20)(batch).batch["x"].tolist() == [0, 1]
        for call in (group.misrouted.options(timeout=20), group.misrouted):
            with pytest.raises(DispatchError, match=r"^Waiting\.misrouted \(ND_COMPUTE_PROTO\): mesh 'doubled'"):
                call(batch)


@pytest.mark.slow
def test_constructors_take_what_only_ray_may_carry():
    given = {"reference": ray.put(3), "actor": ray.remote(num_cpus=0)(Greeter).remote()}
    with WorkerGroup(ResourcePool([2]), Init(Waiting, given), runtime="ray") as group:
        del given
        assert group.call.read() == [(3, "hello")] * 2


@pytest.mark.slow
def test_a_worker_is_shown_as_it_wants_once_it_can_be():
    with WorkerGroup(ResourcePool([1]), Init(Shown, 3), runtime="ray") as group:
        assert group.call.shown() == ["Shown(number=3)"]


@pytest.mark.parametrize("env", [{"A": "a\0b"}, {"A=B": "1"}, {"": "1"}, {1: "a"}, {"A": 1}])
def test_variables_that_cannot_be_are_refused_before_anything_starts(env: Any):
    with pytest.raises(ConfigError, match="an environment variable has a name without '='"):
        WorkerGroup(ResourcePool([1]), Bad, runtime="ray", worker_env=env)


SHUT_DOWN_UNDER_A_GROUP = """
import ray
from podium.errors import GroupClosedError, WorkerError
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

class Later(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def f(self): return 1

group = WorkerGroup(ResourcePool([1]), Later, runtime="ray")
future = group.f()
ray.shutdown()
ray.init = lambda *args, **kwargs: 1 / 0  # no cluster may be joined or started now
for use in (group.f, future.get):
    try:
        use()
    except (GroupClosedError, WorkerError) as error:
        assert "was shut down: make the group anew" in str(error) or "broken" in str(error), error
    else:
        raise AssertionError("an error was expected")
assert group.status().ranks == {}
group.close()
print("refused")
"""


@pytest.mark.slow
def test_a_session_that_was_shut_down_is_an_error_and_no_other_is_joined():
    ended = subprocess.run(
        [sys.executable, "-c", SHUT_DOWN_UNDER_A_GROUP], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.splitlines()[-1:] == ["refused"], ended.stderr


class Settled(Worker):
    """A worker whose constructor lets another thread set a count of torch threads of its own."""

    def __init__(self) -> None:
        other = threading.Thread(target=torch.set_num_threads, args=(1,))
        other.start()
        other.join()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_from_here_on(self, count: int) -> None:
        torch.set_num_threads(count)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rank_in_a_thread(self) -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(current_context().rank))
        thread.start()
        thread.join()
        return found[0]


class SettledAsync(Settled):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def count_on_the_loop(self) -> int:
        return torch.get_num_threads()


@pytest.mark.slow
def test_a_rank_keeps_its_torch_threads_whatever_other_threads_set():
    with WorkerGroup(ResourcePool([2]), SettledAsync, runtime="ray", threads_per_rank=3) as group:
        assert group.count() == group.count_on_the_loop() == [3, 3]
    with WorkerGroup(ResourcePool([2]), Settled, runtime="ray", threads_per_rank=3) as group:
        assert group.count() == [3, 3]
        group.count_from_here_on(2)  # a method may change it for those that follow
        assert group.count() == [2, 2]
        assert group.rank_in_a_thread() == [0, 1]
