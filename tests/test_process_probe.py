"""What is seen of a process from outside. Every process here is a real one, with stdout and stderr in files of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from podium.process_probe import (
    GONE,
    MAX_LINE_CHARS,
    ProcessProbe,
    fatal_trace,
    install_probe,
    last_lines,
    memory_kills,
    readable_stacks,
    take_stacks,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stacks from outside need Linux's /proc"),
    pytest.mark.timeout(120),
]

NOBODY = ProcessProbe(pid=2**22 + 1, started=1, signal=None, stacks=None, stdout=None, stderr=None, oom_kills=None)
WAIT_S = 60.0


class Rank:
    """A process that leaves its traces, unless its body shall do so, and runs `body(pipe, *args)`."""

    def __init__(self, directory: Path, body: Callable[..., None], args: tuple[Any, ...], leaves: bool) -> None:
        self.pipe, there = FORKS.Pipe()
        self.process: BaseProcess = FORKS.Process(target=_rank, args=(there, directory, body, args, leaves), daemon=True)
        self.process.start()
        there.close()
        self.probe: ProcessProbe = self.hear() if leaves else NOBODY

    def hear(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the process says nothing"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


FORKS = mp.get_context("forkserver")  # torch is imported once, by the server
FORKS.set_forkserver_preload([__name__])
Start = Callable[..., Rank]


def _rank(pipe: Connection, directory: Path, body: Callable[..., None], args: tuple[Any, ...], leaves: bool) -> None:
    directory.mkdir()
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    if leaves:
        pipe.send(install_probe())
    body(pipe, *args)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    ranks: list[Rank] = []

    def start_one(body: Callable[..., None], *args: Any, leaves: bool = True) -> Rank:
        ranks.append(Rank(tmp_path / str(len(ranks)), body, args, leaves))
        return ranks[-1]

    yield start_one
    for rank in ranks:
        rank.end()


# -- stacks --------------------------------------------------------------------------------------------------------------


def sleep_in_outer(pipe: Connection) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sleep_in_inner(pipe)


def sleep_in_inner(pipe: Connection) -> None:
    pipe.send("asleep")
    time.sleep(WAIT_S)


def _await_sleep(rank: Rank) -> None:
    rank.hear()
    _until(lambda: "multiprocessing/connection.py" not in take_stacks(rank.probe, wait_s=30))  # `send` has returned


def test_stacks_show_user_code_innermost_first_and_fold_idle_threads(start: Start) -> None:
    rank = start(sleep_in_outer)
    _await_sleep(rank)
    began = time.monotonic()
    lines = take_stacks(rank.probe, wait_s=30).splitlines()
    assert time.monotonic() - began < 10  # it does not sit out its time
    assert [line.split()[-1] for line in lines[:3]] == ["sleep_in_inner", "sleep_in_outer", "_rank"]
    assert lines[0].startswith(f"{Path(__file__)}:")
    assert lines[3:] == ["<string>:1 <module>", "and 1 thread of the runtime"]


def test_a_second_look_shows_only_the_second_dump(start: Start) -> None:
    rank = start(sleep_in_outer)
    _await_sleep(rank)
    first = take_stacks(rank.probe, wait_s=30)
    assert first.count("sleep_in_inner") == 1
    assert take_stacks(rank.probe, wait_s=30) == first


def two_threads_of_user_code(pipe: Connection) -> None:
    threading.Thread(target=sleep_in_inner, args=(pipe,), daemon=True).start()
    pipe.recv()


def test_threads_in_user_code_are_all_shown_the_main_one_first(start: Start) -> None:
    rank = start(two_threads_of_user_code)
    rank.hear()
    main, other = take_stacks(rank.probe, wait_s=30).split("\n\n")
    assert "two_threads_of_user_code" in main
    assert other.splitlines()[-1].endswith("sleep_in_inner")


def reduce_on_signal(pipe: Connection, rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pipe.send("met")
    pipe.recv()
    total = torch.full((1000,), float(rank + 1))
    pipe.send("reducing")
    dist.all_reduce(total)
    pipe.send(total.unique().tolist())


def test_a_rank_inside_a_collective_shows_it_and_the_collective_still_completes(start: Start, tmp_path: Path) -> None:
    ranks = [start(reduce_on_signal, rank, str(tmp_path / "store")) for rank in range(2)]
    assert [rank.hear() for rank in ranks] == ["met", "met"]
    ranks[0].pipe.send("go")
    ranks[0].hear()
    for _ in range(100):
        if "all_reduce" in (stack := take_stacks(ranks[0].probe, wait_s=30)):
            break
    assert "all_reduce" in stack
    assert "reduce_on_signal" in stack
    assert "all_reduce" not in take_stacks(ranks[1].probe, wait_s=30)
    for _ in range(20):
        take_stacks(ranks[0].probe, wait_s=30)
    ranks[1].pipe.send("go")
    ranks[1].hear()
    assert [rank.hear() for rank in ranks] == [[3.0], [3.0]]


def deep(pipe: Connection, depth: int) -> None:
    if depth:
        deep(pipe, depth - 1)
    else:
        pipe.send("deep")
        time.sleep(WAIT_S)


def many_deep_threads(pipe: Connection) -> None:
    for _ in range(20):
        threading.Thread(target=deep, args=(pipe, 60), daemon=True).start()
    time.sleep(WAIT_S)


def test_a_look_waits_for_the_last_thread(start: Start) -> None:
    rank = start(many_deep_threads)
    for _ in range(20):
        rank.hear()
    looks = [take_stacks(rank.probe, wait_s=30).splitlines() for _ in range(5)]
    assert [sum(line.endswith(" deep") for line in look) for look in looks] == [20 * 61] * 5


def test_two_who_look_at_once_see_whole_stacks(start: Start) -> None:
    rank = start(deep, 50)
    rank.hear()
    seen: list[str] = []
    lookers = [threading.Thread(target=lambda: seen.append(take_stacks(rank.probe, wait_s=30))) for _ in range(4)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()
    assert len(seen) == 4
    assert {stack.count(" deep") for stack in seen} == {51}


def test_user_code_keeps_its_handler_of_sigusr2_and_shows_its_stacks(start: Start) -> None:
    rank = start(report_sigusr2)
    rank.hear()
    assert "report_sigusr2" in take_stacks(rank.probe, wait_s=30)
    assert not rank.pipe.poll(0.2)
    os.kill(rank.probe.pid, signal.SIGUSR2)
    assert rank.hear() == "preempted"


def report_sigusr2(pipe: Connection) -> None:
    signal.signal(signal.SIGUSR2, lambda *_: pipe.send("preempted"))
    sleep_in_inner(pipe)


def become_another_program(pipe: Connection) -> None:
    os.set_inheritable(pipe.fileno(), True)
    os.execvp("sh", ["sh", "-c", "exec sleep 60"])


def test_a_process_that_does_not_listen_any_more_is_not_sent_the_signal(start: Start) -> None:
    rank = start(become_another_program)
    _until(lambda: Path(f"/proc/{rank.probe.pid}/comm").read_text() == "sleep\n")
    assert "does not listen" in take_stacks(rank.probe)
    time.sleep(0.2)
    assert rank.process.is_alive()


def test_a_stopped_process_is_called_stopped_after_the_wait(start: Start) -> None:
    rank = start(sleep_in_outer)
    rank.hear()
    os.kill(rank.probe.pid, signal.SIGSTOP)
    assert take_stacks(rank.probe, wait_s=0.2) == "no stacks within 0.2 s: the process is stopped"


def test_a_dead_process_is_gone(start: Start) -> None:
    rank = start(sleep_in_outer)
    rank.end()
    assert take_stacks(rank.probe) == GONE


def test_another_process_with_the_same_pid_is_left_alone(start: Start) -> None:
    rank = start(report_any_look)
    rank.hear()
    earlier = replace(rank.probe, started=(rank.probe.started or 0) - 1)
    assert take_stacks(earlier) == GONE
    assert not rank.pipe.poll(0.2)
    take_stacks(rank.probe)
    assert rank.hear() == "looked at"


def report_any_look(pipe: Connection) -> None:
    number = install_probe().signal
    assert number
    faulthandler.unregister(number)
    signal.signal(number, lambda *_: pipe.send("looked at"))
    sleep_in_inner(pipe)


def test_a_platform_without_stacks_says_so() -> None:
    assert take_stacks(NOBODY) == "stacks are not available on this platform"


def leave_again_from_a_thread(pipe: Connection) -> None:
    thread = threading.Thread(target=lambda: pipe.send(install_probe()))
    thread.start()
    thread.join()
    if (child := os.fork()) == 0:
        pipe.send(install_probe())
        os._exit(0)
    os.waitpid(child, 0)


def test_traces_are_left_once_per_process(start: Start) -> None:
    rank = start(leave_again_from_a_thread)
    assert rank.hear() == rank.probe
    assert rank.hear().pid != rank.probe.pid


def leave_from_a_thread_only(pipe: Connection) -> None:
    thread = threading.Thread(target=lambda: pipe.send(install_probe()))
    thread.start()
    thread.join()
    time.sleep(WAIT_S)


def test_traces_may_be_left_from_any_thread(start: Start) -> None:
    probe = start(leave_from_a_thread_only, leaves=False).hear()
    assert "leave_from_a_thread_only" in take_stacks(probe, wait_s=30)


def test_nothing_is_left_on_disk(start: Start, tmp_path: Path) -> None:
    rank = start(sleep_in_outer)
    rank.hear()
    take_stacks(rank.probe)
    rank.end()
    assert {file.name for file in (tmp_path / "0").iterdir()} == {"out", "err"}
    assert not Path(rank.probe.stacks or "/").exists()


DUMP = """\
Thread 0x00007f80e9732600 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/venv/lib/python3.11/site-packages/tqdm/_monitor.py", line 60 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f811d01db80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2829 in all_reduce
  File "/home/me/my worker.py", line 12 in update
  File "/venv/lib/python3.11/site-packages/ray/util/tracing/tracing_helper.py", line 487 in _resume_span
  File "/home/me/my worker.py", line 9 in train
  File "/src/podium/single_controller/runtime/rank.py", line 27 in run_as_rank
  File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 1069 in main_loop
"""


def test_frames_that_lead_to_user_code_are_left_out_and_paths_shortened() -> None:
    assert readable_stacks(DUMP).splitlines() == [
        "torch/distributed/distributed_c10d.py:2829 all_reduce",
        "/home/me/my worker.py:12 update",
        "/home/me/my worker.py:9 train",
        "and 1 thread of the runtime",
    ]


def test_an_idle_worker_runs_no_user_code() -> None:
    idle = "\n".join(line for line in DUMP.splitlines() if "/home/me" not in line)
    assert readable_stacks(idle).splitlines() == ["no user code is running", "and 2 threads of the runtime"]


def test_a_worker_of_an_installed_package_shows_its_main_thread() -> None:
    installed = DUMP.replace("/home/me/my worker.py", "/venv/lib/python3.11/site-packages/kit/worker.py")
    assert "kit/worker.py:12 update" in readable_stacks(installed)
    assert "tqdm" not in readable_stacks(installed)


def test_podiums_own_workers_are_user_code_wherever_podium_is_installed() -> None:
    podium = DUMP.replace("/home/me/my worker.py", "/venv/lib/python3.11/site-packages/podium/workers/training.py")
    assert readable_stacks(podium).splitlines()[1] == "podium/workers/training.py:12 update"


# -- crashes -------------------------------------------------------------------------------------------------------------


def crash(pipe: Connection) -> None:
    os.write(1, b"an answer\n")
    os.write(2, b"a warning\n")
    ctypes.string_at(0)


def test_a_segfault_leaves_a_trace_apart_from_what_was_written(start: Start) -> None:
    rank = start(crash)
    rank.process.join(WAIT_S)
    trace = fatal_trace(rank.probe).splitlines()
    assert trace[0] == "Fatal Python error: Segmentation fault"
    assert any(line.endswith("in crash") for line in trace)
    assert last_lines(rank.probe).splitlines() == [
        "last lines of stderr:",
        "  a warning",
        "last lines of stdout:",
        "  an answer",
    ]


def test_a_process_that_did_not_crash_has_no_trace(start: Start) -> None:
    rank = start(sleep_in_outer)
    rank.end()
    assert fatal_trace(rank.probe) == ""


def crash_with_a_faulthandler_of_its_own(pipe: Connection, path: str) -> None:
    file = Path(path).open("w")  # noqa: SIM115 - open until the crash
    faulthandler.enable(file)
    pipe.send(install_probe())
    ctypes.string_at(0)


def test_a_faulthandler_that_was_enabled_before_keeps_its_file(start: Start, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    rank = start(crash_with_a_faulthandler_of_its_own, str(theirs), leaves=False)
    probe = rank.hear()
    rank.process.join(WAIT_S)
    assert "Segmentation fault" in theirs.read_text()
    assert fatal_trace(probe) == ""


RAY_CRASH = """\
:job_id:01000000
:actor_name:A
a warning
*** SIGSEGV received at time=1795969597 on cpu 1 ***
PC: @     0x7f3ef4b85ad8  (unknown)  (unknown)
    @     0x7f3ef4a5a050       1216  ncclCommAbort
[2026-11-29 16:26:37,918 E 5990 5990] logging.cc:474: *** SIGSEGV received at time=1795969597 on cpu 1 ***
[2026-11-29 16:26:37,918 E 5990 5990] logging.cc:474:     @     0x7f3ef4a5a050       1216  ncclCommAbort
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/home/me/worker.py", line 12 in crash

Extension modules: msgpack._cmsgpack, ray._raylet (total: 2)
/usr/lib/python3.11/multiprocessing/resource_tracker.py:224: UserWarning: 1 leaked semaphore
"""


def test_rays_report_of_a_crash_is_shown_once_and_apart(tmp_path: Path) -> None:
    probe = replace(NOBODY, stderr=_log(tmp_path, RAY_CRASH))
    assert fatal_trace(probe).splitlines() == [
        "*** SIGSEGV received at time=1795969597 on cpu 1 ***",
        "    @     0x7f3ef4a5a050       1216  ncclCommAbort",
        "Fatal Python error: Segmentation fault",
        "Stack (most recent call first):",
        '  File "/home/me/worker.py", line 12 in crash',
    ]
    lines = last_lines(probe).splitlines()
    assert lines[1] == "  a warning"
    assert lines[2].endswith("1 leaked semaphore")
    assert len(lines) == 3


def test_a_kill_for_lack_of_memory_is_reported_of_the_machine() -> None:
    now = install_probe().oom_kills
    assert now is not None
    assert "killed 2 processes of this machine for lack of memory" in memory_kills(replace(NOBODY, oom_kills=now - 2))
    assert memory_kills(replace(NOBODY, oom_kills=now)) == ""


# -- logs ----------------------------------------------------------------------------------------------------------------


def test_the_last_lines_survive_the_process_and_a_partial_one_counts(start: Start) -> None:
    rank = start(write_and_die)
    rank.process.join(WAIT_S)
    assert last_lines(rank.probe, count=2) == "last lines of stderr:\n  line 98\n  half a li"


def write_and_die(pipe: Connection) -> None:
    os.write(2, "".join(f"line {n}\n" for n in range(99)).encode() + b"half a li")
    os._exit(7)


def test_of_a_big_log_only_the_end_is_read(tmp_path: Path) -> None:
    line = "x" * 99 + "\n"
    log = _log(tmp_path, line * 100_000 + "the end\n")
    began = time.perf_counter()
    lines = last_lines(replace(NOBODY, stderr=log), count=3).splitlines()
    assert time.perf_counter() - began < 0.5
    assert lines == ["last lines of stderr:", "  " + "x" * 99, "  " + "x" * 99, "  the end"]


def test_a_log_without_line_breaks_is_cut(tmp_path: Path) -> None:
    lines = last_lines(replace(NOBODY, stdout=_log(tmp_path, "x" * 5000))).splitlines()
    assert lines == ["last lines of stdout:", "  " + "x" * MAX_LINE_CHARS + "... (5000 characters)"]


def test_markers_progress_and_colours_are_left_out(tmp_path: Path) -> None:
    text = ":job_id:01000000\n:actor_name:A\n  0%|   \r 50%|#  \r100%|###\n\x1b[31mred\x1b[0m\r\n\n:task_name:f\nlast\n\n"
    assert last_lines(replace(NOBODY, stderr=_log(tmp_path, text))).splitlines()[1:] == ["  100%|###", "  red", "  ", "  last"]


def test_bytes_that_are_not_text_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"caf\xe9\n")
    assert last_lines(replace(NOBODY, stderr=str(path))) == "last lines of stderr:\n  caf\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["", "\n\n", ":job_id:01000000\n:actor_name:A\n"])
def test_a_log_that_says_nothing_gives_nothing(tmp_path: Path, text: str) -> None:
    assert last_lines(replace(NOBODY, stdout=_log(tmp_path, text), stderr=str(tmp_path / "gone"))) == ""


def test_only_files_that_the_process_alone_writes_are_named(start: Start, tmp_path: Path) -> None:
    rank = start(leave_again_from_a_thread)
    assert rank.probe.stdout == str(tmp_path / "0" / "out")
    assert rank.probe.stderr == str(tmp_path / "0" / "err")
    forked = [rank.hear(), rank.hear()][1]  # its outputs are its parent's
    assert (forked.stdout, forked.stderr) == (None, None)


def write_to_a_pipe(pipe: Connection) -> None:
    end = os.pipe()[1]
    os.dup2(end, 1)
    os.dup2(end, 2)
    pipe.send(install_probe())


def write_all_to_stderr(pipe: Connection) -> None:
    os.dup2(2, 1)
    pipe.send(install_probe())


def write_to_a_deleted_file(pipe: Connection, directory: str) -> None:
    (Path(directory) / "err").unlink()
    pipe.send(install_probe())


def close_everything(pipe: Connection) -> None:
    os.close(1)
    os.close(2)
    pipe.send(install_probe())


def test_an_output_without_a_file_of_its_own_has_no_path(start: Start, tmp_path: Path) -> None:
    piped, closed = (start(body, leaves=False).hear() for body in (write_to_a_pipe, close_everything))
    assert (piped.stdout, piped.stderr) == (None, None)
    assert (closed.stdout, closed.stderr) == (None, None)
    deleted = start(write_to_a_deleted_file, str(tmp_path / "2"), leaves=False).hear()
    assert (deleted.stdout, deleted.stderr) == (str(tmp_path / "2" / "out"), None)


def test_one_file_for_both_outputs_is_named_once(start: Start, tmp_path: Path) -> None:
    probe = start(write_all_to_stderr, leaves=False).hear()
    assert (probe.stdout, probe.stderr) == (None, str(tmp_path / "0" / "err"))


def test_a_probe_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(NOBODY)) == NOBODY


def _log(directory: Path, text: str) -> str:
    path = directory / "log"
    path.write_bytes(text.encode())
    return str(path)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
