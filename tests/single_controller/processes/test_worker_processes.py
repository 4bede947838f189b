"""What worker processes keep, send later, raise and forget, over a runtime whose outcomes arrive when the test says."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from podium.errors import CallTimeoutError, ConfigError, GroupClosedError, UnsupportedByRuntime, WorkerError
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register
from podium.single_controller.calls.futures import GroupFuture
from podium.single_controller.processes import worker_processes
from podium.single_controller.processes.in_flight import LOOKS_PER_CALL
from podium.single_controller.processes.lifecycle import State
from podium.single_controller.processes.pending_call import PendingCall
from podium.single_controller.processes.worker_processes import DEFAULT_CALL_TIMEOUT_S, WorkerProcesses
from podium.single_controller.runtime.base import Answer, GroupSpec, Outcome, RankCall, Reply
from tests.single_controller.processes.scripted import NEVER, Scripted, after, died, raised, seen

CALLS = [RankCall(range(2), None, "f", (), {})]


class Idle(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def f(self) -> None: ...


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> WorkerProcesses:
    """Worker processes that pass for some on Ray; each restart makes another runtime."""
    monkeypatch.setattr(worker_processes, "build_runtime", lambda name: Scripted())
    made = WorkerProcesses(GroupSpec("g", Idle, (), {}, ResourcePool([2])), "ray")
    made.start()
    return made


def script(processes: WorkerProcesses, *outcomes: tuple[float, Outcome]) -> Scripted:
    assert isinstance(processes.runtime, Scripted)
    processes.runtime.script += [after(*entry) for entry in outcomes]
    return processes.runtime


def call(processes: WorkerProcesses, method: str = "f") -> GroupFuture[dict[int, object]]:
    """A call that does not block, as a group makes it."""
    processes.admit(method)
    future: GroupFuture[dict[int, object]] = GroupFuture(processes.submit(method, CALLS, Reply.VALUE), lambda answers: answers)
    processes.expect_reader(future)
    return future


def defer(processes: WorkerProcesses, gate: threading.Event, method: str) -> GroupFuture[dict[int, object]]:
    """A call whose arguments are there when the gate opens."""
    sent = processes.later(method, lambda: assert_opens(gate), lambda: processes.submit(method, CALLS, Reply.VALUE))
    return GroupFuture(sent, lambda answers: answers)


def assert_opens(gate: threading.Event) -> None:
    assert gate.wait(20.0)


# -- unread failures ------------------------------------------------------------------------------------------------------


def test_an_unread_failure_is_raised_once_at_the_next_call(processes: WorkerProcesses):
    script(processes, (0.0, raised(0)))
    future = call(processes)
    with pytest.raises(WorkerError, match="bad") as caught:
        processes.admit("next")
    processes.admit("next")
    with pytest.raises(WorkerError) as again:
        future.get()
    assert again.value is caught.value
    processes.close()


def test_an_unread_failure_is_raised_once_at_close(processes: WorkerProcesses):
    script(processes, (0.0, raised(0)))
    call(processes)
    with pytest.raises(WorkerError, match="bad"):
        processes.close()
    assert processes.lifecycle.state is State.CLOSED
    processes.close()


@pytest.mark.parametrize("read", [lambda future: future.get(), lambda future: future.get(timeout=5.0)])
def test_a_failure_that_was_read_is_not_raised_again(processes: WorkerProcesses, read: Callable[[GroupFuture[object]], object]):
    script(processes, (0.0, raised(0)))
    with pytest.raises(WorkerError):
        read(call(processes))
    processes.admit("next")
    processes.close()


def test_a_wait_that_gave_up_has_read_nothing(processes: WorkerProcesses):
    script(processes, (0.3, raised(0)))
    future = call(processes)
    with pytest.raises(CallTimeoutError, match=r"'f' has not finished within 0\.01 s; it is still running"):
        future.get(timeout=0.01)
    assert not future.is_read
    time.sleep(0.4)
    with pytest.raises(WorkerError, match="bad"):
        processes.admit("next")


def test_a_failure_is_found_behind_calls_that_go_on(processes: WorkerProcesses):
    outcomes: list[tuple[float, Outcome]] = [(NEVER, Answer(0))] * (2 * LOOKS_PER_CALL)
    script(processes, *outcomes, (0.0, raised(0)))
    futures = [call(processes) for _ in range(2 * LOOKS_PER_CALL + 1)]
    for _ in range(2):  # each call looks at a few of them
        processes.admit("next")
    with pytest.raises(WorkerError, match="bad"):
        processes.admit("next")
    assert not futures[0].done()


def test_close_raises_nothing_after_a_break_that_was_raised(processes: WorkerProcesses):
    script(processes, (0.0, died(0)), (0.0, died(0)))
    first, _ = call(processes), processes.submit("f", CALLS, Reply.VALUE)
    with pytest.raises(WorkerError):
        first.get()
    with pytest.raises(GroupClosedError, match=r"broken since method 'f' failed: rank 0: ProcessDied.*restart\(\)"):
        processes.admit("next")
    processes.close()
    assert processes.lifecycle.state is State.CLOSED


def test_an_error_in_the_with_block_is_not_masked():
    class Fails(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def fail(self) -> None:
            raise ValueError("unread")

    def leave_unread(group: WorkerGroup[Fails], divisor: int) -> None:
        with group:
            group.fail()
            _ = 1 / divisor

    with pytest.raises(ZeroDivisionError):
        leave_unread(WorkerGroup(ResourcePool([2]), Fails), divisor=0)
    with pytest.raises(WorkerError, match="unread"):
        leave_unread(WorkerGroup(ResourcePool([2]), Fails), divisor=1)


# -- what is kept ----------------------------------------------------------------------------------------------------------


class Data:
    """Something that shows when it is let go."""


def test_finished_calls_leave_nothing_behind(processes: WorkerProcesses):
    script(processes, (NEVER, Answer(0)))
    server = call(processes, "serve")  # lasts as long as the processes
    kept = []
    for number in range(1000):
        answer, argument = Data(), Data()
        kept += [weakref.ref(answer), weakref.ref(argument)]
        script(processes, (0.0, Answer(answer)))
        future = call(processes)
        if number % 2:  # the others are never read
            future._unsettled = (future._unsettled[0], lambda answers, argument=argument: answers)  # type: ignore[index, misc]
            assert future.get()[0] is answer
    del answer, argument, future
    processes.admit("next")
    gc.collect()
    assert len(processes._in_flight) <= 2 + LOOKS_PER_CALL
    assert sum(one() is not None for one in kept) <= 2 * LOOKS_PER_CALL
    assert not server.done()


def test_a_settled_future_keeps_its_value_and_nothing_else(processes: WorkerProcesses):
    argument = Data()
    gone = weakref.ref(argument)
    future = GroupFuture(processes.submit("f", CALLS, Reply.VALUE), lambda answers, argument=argument: "value")
    del argument
    assert gone() is not None
    assert future.get() == "value"
    gc.collect()
    assert gone() is None


def test_blocking_calls_are_not_kept(processes: WorkerProcesses):
    for _ in range(10):
        processes.submit("f", CALLS, Reply.VALUE).finish()
    assert len(processes._in_flight) == 0


def test_a_call_whose_references_were_taken_is_not_tracked(processes: WorkerProcesses):
    script(processes, *[(NEVER, Answer(0))] * 2)
    server, taken = call(processes, "serve"), call(processes, "taken")
    assert [one.method for one in processes.status().calls] == ["serve", "taken"]
    call_of_taken = weakref.ref(taken._unsettled[0])  # type: ignore[index]
    taken.hand_over()
    assert [one.method for one in processes.status().calls] == ["serve"]
    del taken
    assert call_of_taken() is None  # at once: it kept its result alive
    script(processes, (0.0, Answer(7)))
    read_twice = call(processes)
    read_twice.hand_over()
    assert read_twice.get() == {0: 7, 1: 7}
    assert not server.done()
    assert len(processes._in_flight) == 2, "the server's call: without an answer, and without a reader"


def test_a_list_of_futures_keeps_no_argument():
    class Takes(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        def take(self, value: object) -> None: ...

    argument = Data()
    gone = weakref.ref(argument)
    futures = WorkerGroup(ResourcePool([1]), Takes).take(argument)
    del argument
    assert gone() is None
    assert futures.get() == [None]


# -- worker processes without a group ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_detached", [False, True])
def test_processes_without_close_end_when_they_are_collected(monkeypatch: pytest.MonkeyPatch, is_detached: bool):
    closed = threading.Event()

    class Notes(Scripted):
        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(worker_processes, "build_runtime", lambda name: Notes())
    processes = WorkerProcesses(GroupSpec("g", Idle, (), {}, ResourcePool([2]), detached=is_detached), "ray")
    processes.start()
    future = call(processes)
    assert not closed.wait(0.05)
    del processes
    gc.collect()
    assert closed.wait(0.3 if is_detached else 20.0) is not is_detached
    assert future.get() == {0: None, 1: None}


def test_a_crew_that_was_closed_is_not_closed_behind_it_again(monkeypatch: pytest.MonkeyPatch):
    closed: list[object] = []

    class Notes(Scripted):
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(worker_processes, "build_runtime", lambda name: Notes())
    processes = WorkerProcesses(GroupSpec("g", Idle, (), {}, ResourcePool([2])), "ray")
    processes.start()
    processes.restart()
    processes.close()
    del processes
    gc.collect()
    time.sleep(0.1)
    assert len(closed) == 2  # the runtime before the restart, and the one after it


# -- calls that wait for their arguments -----------------------------------------------------------------------------------


def test_deferred_calls_are_sent_in_order_while_the_driver_sleeps(processes: WorkerProcesses):
    gates = [threading.Event() for _ in range(3)]
    script(processes, *((0.0, Answer(number)) for number in range(3)))
    futures = [defer(processes, gate, f"f{number}") for number, gate in enumerate(gates)]
    for gate in reversed(gates):
        assert not futures[0].done()
        gate.set()
    time.sleep(0.2)
    assert [future.done() for future in futures] == [True] * 3
    assert [future.get() for future in futures] == [{0: number, 1: number} for number in range(3)]


def test_status_tells_what_waits_to_be_sent(processes: WorkerProcesses):
    gate = threading.Event()
    future = defer(processes, gate, "consume")
    assert processes.status().unsent == ("consume",)
    assert "  consume: not sent, waits for its arguments" in str(processes.status())
    gate.set()
    future.get()
    processes.wait_for_deferred()
    assert processes.status().unsent == ()


@pytest.mark.parametrize("end", [WorkerProcesses.restart, WorkerProcesses.close])
def test_what_was_not_sent_yet_is_not_sent_to_the_ranks_that_follow(
    processes: WorkerProcesses, end: Callable[[WorkerProcesses], None]
):
    gate = threading.Event()
    waiting, behind = defer(processes, gate, "first"), defer(processes, gate, "second")
    end(processes)
    for future in (waiting, behind):  # at once, not when the argument is there
        with pytest.raises(GroupClosedError, match=r"'(first|second)' was not sent: its group was (restarted|closed)"):
            future.get(timeout=5.0)
    sent = script(processes, (0.0, raised(0)))
    gate.set()
    time.sleep(0.05)
    assert len(sent.script) == 1


def test_an_argument_that_failed_is_the_error_of_the_call(processes: WorkerProcesses):
    def fail() -> None:
        raise TimeoutError("no argument")

    future = GroupFuture(processes.later("f", fail, lambda: processes.submit("f", CALLS, Reply.VALUE)), lambda answers: answers)
    with pytest.raises(TimeoutError, match="no argument"):
        future.get(timeout=5.0)
    assert future.done()
    assert future.has_failed


def test_an_unread_failure_is_not_raised_by_a_deferred_call(processes: WorkerProcesses):
    script(processes, (0.0, raised(0)))
    call(processes)

    def send() -> PendingCall:
        processes.admit("query")  # as the query of a mesh does, on the thread of deferred calls
        return processes.submit("f", CALLS, Reply.VALUE)

    sent = processes.later("f", lambda: None, send)
    assert sent.finish() == {0: None, 1: None}
    with pytest.raises(WorkerError, match="bad"):
        processes.admit("next")


def test_without_a_thread_nothing_is_posted_and_the_next_call_tries_again(
    processes: WorkerProcesses, monkeypatch: pytest.MonkeyPatch
):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            defer(processes, gate, "lost")
    assert processes.status().unsent == ()
    processes.wait_for_deferred()
    future = defer(processes, gate, "sent")
    gate.set()
    assert future.get(timeout=20.0) == {0: None, 1: None}


def test_a_driver_that_leaves_does_not_wait_for_what_was_not_sent():
    program = (
        "import threading\n"
        "from podium.single_controller.processes.deferred import DeferredCall, DeferredCalls\n"
        "DeferredCalls().post(DeferredCall('f', threading.Event().wait, lambda: None))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


# -- restart ---------------------------------------------------------------------------------------------------------------


def test_a_restart_makes_a_new_lifecycle(processes: WorkerProcesses):
    script(processes, (0.0, died(1)))
    before = processes.runtime
    with pytest.raises(WorkerError):
        call(processes).get()
    processes.meshes[None, "actor"] = processes.flat_mesh
    processes.restart()
    assert processes.runtime is not before
    assert (processes.lifecycle.state, processes.meshes, len(processes._in_flight)) == (State.READY, {}, 0)
    assert call(processes).get() == {0: None, 1: None}


def test_late_events_of_ranks_before_a_restart_do_not_affect_those_after(processes: WorkerProcesses):
    script(processes, (0.0, died(0)))
    old = processes.submit("f", CALLS, Reply.VALUE)
    processes.restart()
    with pytest.raises(GroupClosedError, match="'f' of group 'g' was running when that was restarted"):
        old.finish()
    assert processes.lifecycle.state is State.READY
    assert isinstance(processes.runtime, Scripted)
    assert processes.runtime.killed == []


def test_a_failed_restart_leaves_a_broken_group_that_may_restart_again(
    processes: WorkerProcesses, monkeypatch: pytest.MonkeyPatch
):
    closed: list[Scripted] = []

    class Fails(Scripted):
        def start(self, spec: GroupSpec) -> dict[int, object]:  # type: ignore[override]
            return {0: after(0.0, raised(0, message="no memory")), 1: after(0.0, Answer(None))}

        def close(self) -> None:
            closed.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(worker_processes, "build_runtime", lambda name: Fails())
        with pytest.raises(WorkerError, match="no memory"):
            processes.restart()
    assert closed == [processes.runtime]
    with pytest.raises(GroupClosedError, match=r"broken since its restart failed: ValueError: no memory; restart\(\)"):
        processes.admit("f")
    processes.restart()
    assert processes.lifecycle.state is State.READY


def test_a_closed_crew_does_not_restart(processes: WorkerProcesses):
    processes.close()
    with pytest.raises(GroupClosedError, match="cannot restart group 'g': it was closed"):
        processes.restart()


def test_only_the_driver_that_started_the_ranks_restarts_them(processes: WorkerProcesses):
    processes._is_owner = False  # as after `attached`
    with pytest.raises(UnsupportedByRuntime, match="was started by another driver"):
        processes.restart()
    assert call(processes).get() == {0: None, 1: None}


# -- limits, status, log ---------------------------------------------------------------------------------------------------


def test_every_call_has_a_limit(processes: WorkerProcesses):
    ranks_know = [context.call_timeout_s for context in processes.spec.contexts("ray")]
    assert ranks_know == [DEFAULT_CALL_TIMEOUT_S] * processes.world_size
    assert processes.submit("f", CALLS, Reply.VALUE).timeout_s == DEFAULT_CALL_TIMEOUT_S
    assert processes.submit("f", CALLS, Reply.VALUE, timeout_s=3.0).timeout_s == 3.0
    with pytest.raises(ConfigError, match="more than 0 seconds, got -1"):
        processes.submit("f", CALLS, Reply.VALUE, timeout_s=-1.0)
    with pytest.raises(ConfigError, match="slow_after_s must be more than 0 seconds, got 0"):
        WorkerProcesses(processes.spec, "ray", slow_after_s=0.0)


def test_status_shows_calls_ranks_and_the_awaited_stacks_first(processes: WorkerProcesses):
    runtime = script(processes, (0.0, Answer(0)))
    runtime.known = {0: seen(stacks="no user code is running"), 1: seen(stacks="/w.py:3 load")}
    processes.submit("over", CALLS, Reply.VALUE)
    stuck = PendingCall(
        runtime, "g", "load", {1: after(NEVER, Answer(1))}, 60.0, processes.lifecycle, in_flight=processes._in_flight
    )
    status = processes.status(stacks=True)
    (only,) = status.calls
    assert (only.method, only.silent_ranks) == ("load", (1,))
    assert 0 <= only.age_s <= stuck.age_s
    assert status.ranks == runtime.known
    assert str(status).startswith("group 'g': ready\n  load: 0.0 s, waits for rank 1\n  rank 0: alive, node node, pid 1\n")
    assert str(status).endswith("rank 1:\n  /w.py:3 load\nrank 0:\n  no user code is running")
    processes.close()
    assert str(processes.status()) == "group 'g': closed"


def test_status_of_a_broken_crew_says_why(processes: WorkerProcesses):
    runtime = script(processes)
    runtime.known = {0: seen(is_alive=False)}
    processes.lifecycle.break_down("rank 0 died")
    assert str(processes.status()) == "group 'g': broken since rank 0 died\n  rank 0: dead, node node, pid 1"


def test_status_of_an_inline_group():
    group = WorkerGroup(ResourcePool([2]), Idle)
    group.f()
    status = group.status(stacks=True)
    assert (status.state, status.calls, dict(status.ranks)) == (State.READY, (), {})


LOGGING = """
import logging
{before}
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

class Idle(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def f(self) -> None: ...

WorkerGroup(ResourcePool([1]), Idle)
{after}
log = logging.getLogger("podium.single_controller")
assert log.level == logging.NOTSET and not log.handlers
log.info("joined a cluster")
log.warning("rank 1 is slow")
"""
OWN_HANDLER = """
ours = logging.getLogger("podium")
ours.setLevel(logging.INFO)
ours.addHandler(logging.StreamHandler())
ours.propagate = False
"""
LIBRARY_TAKES_THE_ROOT = """
logging.getLogger().setLevel(logging.ERROR)
logging.getLogger().handlers.clear()
"""


CASES_IN_FORKS = """
import os, sys, traceback
import tensordict, torch  # once for all cases
for program in sys.argv[1:]:
    print("next case", file=sys.stderr, flush=True)
    if (child := os.fork()) == 0:
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


def test_the_program_decides_what_is_logged_and_where():
    cases: list[tuple[str, str, list[str]]] = [
        ("", "", ["rank 1 is slow"]),
        ("", "logging.basicConfig(level=logging.INFO, format='%(message)s')", ["joined a cluster", "rank 1 is slow"]),
        ("", LIBRARY_TAKES_THE_ROOT, []),
        (OWN_HANDLER, LIBRARY_TAKES_THE_ROOT, ["joined a cluster", "rank 1 is slow"]),
        (OWN_HANDLER, "logging.basicConfig(level=logging.INFO)", ["joined a cluster", "rank 1 is slow"]),
    ]
    programs = [LOGGING.format(before=before, after=after) for before, after, _ in cases]
    command = [sys.executable, "-c", CASES_IN_FORKS, *programs]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [case.splitlines()[1:] for case in ran.stderr.split("next case")[1:]] == [lines for _, _, lines in cases]
