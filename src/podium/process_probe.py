"""What can be learnt of a rank's process from outside: on its own machine, as the same user, without ptrace.

The worker calls `install_probe` once and sends the ProcessProbe to whoever watches it. Nothing lies on disk: stacks go to a
memory file that the watcher opens through /proc and that ends with the process, kill -9 included; a crash goes to the worker's
stderr. Where the system lacks something (macOS, Windows), the answer is a sentence that says so.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GONE = "process is gone"
LAST_LINES = 20
MAX_LINE_CHARS = 300
"""Longer lines of a log tail are cut: a dumped tensor or a base64 string shall not bury the report."""
TAIL_BYTES = 256 * 1024
"""How much of a log's end is read: 20 lines of tqdm or of long dumps, and a crash report of 100 threads."""
POLL_S = 0.002

_MEMORY_FILE = "podium-stacks"
_THREAD = re.compile(r"(?P<current>Current )?[Tt]hread (?P<id>0x[0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\S+) in (?P<name>.*)')
_STDLIB = r".*/lib/python3\.\d+t?/(?!site-packages/|dist-packages/)"
_INSTALLED = r".*/(?:site|dist)-packages/"
_RUNTIME = re.compile(rf"<frozen |{_STDLIB}|{_INSTALLED}(?:ray|torch)/|.*/podium/single_controller/")
_LIBRARY = re.compile(rf"{_INSTALLED}(?!podium/)")
_PREFIX = re.compile(rf"{_STDLIB}|{_INSTALLED}")

_STATES = {"T": "the process is stopped", "t": "a debugger holds the process", "D": "the process waits inside the kernel"}

_RAY_MARKER = re.compile(r":(?:job_id|actor_name|task_name):|\[.*logging\.cc:\d+: (?:\*\*\*|PC:|    @)")
_CRASH = re.compile(r"Fatal Python error: |\*\*\* SIG[A-Z]+ received at time=")  # faulthandler's, and that of Ray's C++ part
_CRASH_GOES_ON = re.compile(
    r"PC: |    @|Python runtime state|(Current )?[Tt]hread 0x|Stack \(|  File \"|  \.\.\.|  <|\.\.\.$|Extension modules: |\s*$"
)
_CRASH_NOISE = re.compile(r"Extension modules: |.*\(unknown\)  \(unknown\)$|\s*$")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class ProcessProbe:
    """Where the traces of one process are. Only a process of the same machine can follow it."""

    pid: int
    started: int | None
    """Clock ticks from the machine's boot to the process's start: it distinguishes a later process with the same pid."""
    signal: int | None
    """The signal that makes the process write its stacks; None where that is not available."""
    stacks: str | None
    """The memory file of the stacks, under /proc."""
    stdout: str | None
    """The file that this process alone writes; None for a terminal, a pipe, a file of the parent's, or the same as stderr."""
    stderr: str | None
    oom_kills: int | None
    """Processes that the machine's kernel had killed for lack of memory when this one left its traces."""


def install_probe() -> ProcessProbe:
    """Make this process ready to be looked at. Call it in the worker, on any thread; a repeated call changes nothing.

    User code loses nothing. The stacks' signal is a real-time signal without a handler: SIGUSR2 stays free for Slurm and
    submitit, which announce preemption by it. A faulthandler that is enabled already stays as it is; otherwise
    it is enabled on stderr, where Ray puts it too: a person who reads the log finds the crash, and nothing has to be deleted.
    """
    return _install_probe(os.getpid())


def take_stacks(probe: ProcessProbe, wait_s: float = 1.0) -> str:
    """The Python stacks of the process now, those in user code first, innermost call first; idle threads as one line.

    Returns as soon as the process has written them, after `wait_s` at the latest. The call that the process is in goes on
    undisturbed (a system call may return EINTR, as with any signal). When there are none, one sentence says why.
    """
    if probe.signal is None or probe.stacks is None:
        return "stacks are not available on this platform"
    try:
        if is_alive(probe) and not _listens(probe.pid, probe.signal, probe.stacks):
            return "stacks are not available: the process does not listen for the signal any more"
        dump, is_whole = _ask(probe, probe.signal, probe.stacks, wait_s) if is_alive(probe) else ("", True)
    except OSError as error:
        return f"stacks are not available: {error}" if is_alive(probe) else GONE
    text = readable_stacks(dump)
    return (text if is_whole else f"{text}\n(cut off after {wait_s:g} s)") if text else _no_answer(probe, wait_s)


def last_lines(probe: ProcessProbe, count: int = LAST_LINES) -> str:
    """The last lines that the process wrote: of stderr and of stdout, each labelled and up to `count`; "" when there are none.

    Readable after its death. What belongs to a crash is left out (see `fatal_trace`), so are Ray's markers and what a
    progress bar has overwritten. Lines that the process holds in a buffer are not there yet.
    """
    parts = []
    for name, path in (("stderr", probe.stderr), ("stdout", probe.stdout)):
        lines = list(map(_cut, _split_at_crash(path)[0]))[-count:] if count > 0 else []
        parts += [f"last lines of {name}:", *(f"  {line}" for line in lines)] if lines else []
    return "\n".join(parts)


def fatal_trace(probe: ProcessProbe) -> str:
    """What a crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) left on stderr, or "". Native frames appear where they have names.

    Ask for a dead process: on the stderr of one that lives, a crash is that of a child.
    """
    lines = _split_at_crash(probe.stderr)[1]
    return "\n".join(_cut(line) for line in lines if not _CRASH_NOISE.match(line))


def memory_kills(probe: ProcessProbe) -> str:
    """A sentence about the processes of this machine that its kernel killed for lack of memory since this one started, or ""."""
    now = _oom_kills()
    if now is None or probe.oom_kills is None or now <= probe.oom_kills:
        return ""
    count = now - probe.oom_kills
    return f"since it started, the kernel has killed {count} process{'es' * (count > 1)} of this machine for lack of memory"


# -- in the worker -------------------------------------------------------------------------------------------------------


@cache  # by pid, so that a forked child gets traces of its own
def _install_probe(pid: int) -> ProcessProbe:
    if not faulthandler.is_enabled():
        _enable_on_stderr()
    number, stacks = _register_stacks(pid)
    stderr = _own_file(2)
    stdout = _own_file(1)
    return ProcessProbe(
        pid=pid,
        started=_start_ticks(pid),
        signal=number,
        stacks=stacks,
        stdout=None if stdout == stderr else stdout,
        stderr=stderr,
        oom_kills=_oom_kills(),
    )


def _enable_on_stderr() -> None:
    try:
        os.fstat(2)
    except OSError:  # closed: the number may be given to a file of the user's
        return
    faulthandler.enable(2, all_threads=True)


def _register_stacks(pid: int) -> tuple[int | None, str | None]:
    if sys.platform != "linux" or (number := _free_signal(pid)) is None:
        return None, None
    file = os.memfd_create(_MEMORY_FILE)  # stays open as long as the process
    faulthandler.register(number, file, all_threads=True, chain=False)
    return number, f"/proc/{pid}/fd/{file}"


def _free_signal(pid: int) -> int | None:
    """A real-time signal without a handler; the C library and debuggers use the first and the last few."""
    if sys.platform != "linux" or (caught := _mask(_status(f"/proc/{pid}"), "SigCgt")) is None:
        return None
    numbers = range(signal.SIGRTMIN + 8, signal.SIGRTMAX - 8)
    return next((number for number in numbers if not caught >> (number - 1) & 1), None)


def _own_file(descriptor: int) -> str | None:
    """The path of the regular file behind a descriptor, None if the parent writes there too: its lines could be anyone's."""
    try:
        here = os.fstat(descriptor)
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if not stat.S_ISREG(here.st_mode) or not os.path.samestat(here, Path(path).stat()):
            return None
    except OSError:
        return None
    return None if any(os.path.samestat(here, other) for other in _outputs(os.getppid())) else path


def _outputs(pid: int) -> Iterator[os.stat_result]:
    for descriptor in (1, 2):
        try:
            yield Path(f"/proc/{pid}/fd/{descriptor}").stat()
        except OSError:  # closed, or not ours to see
            continue


# -- the process, through /proc ------------------------------------------------------------------------------------------


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (the second is a name that may hold anything); [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def is_alive(probe: ProcessProbe) -> bool:
    fields = _stat_fields(probe.pid)
    return bool(fields) and int(fields[19]) == probe.started and fields[0] not in "ZX"


def _status(directory: str) -> dict[str, str]:
    try:
        lines = Path(directory, "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _mask(status: dict[str, str], field: str) -> int | None:
    return int(status[field], 16) if field in status else None


def _listens(pid: int, number: int, stacks: str) -> bool:
    """Whether the signal is caught, and for us: uncaught it would end the process (after an exec, say)."""
    caught = _mask(_status(f"/proc/{pid}"), "SigCgt") or 0
    return bool(caught >> (number - 1) & 1) and Path(stacks).is_symlink() and _MEMORY_FILE in str(Path(stacks).readlink())


def _ask(probe: ProcessProbe, number: int, path: str, wait_s: float) -> tuple[str, bool]:
    """What the process wrote after one signal, and whether that is all. OSError when it is gone."""
    with Path(path).open("rb") as file:
        before = file.seek(0, os.SEEK_END)
        blocked = _holding(probe.pid, number)
        os.kill(probe.pid, number)
        deadline = time.monotonic() + wait_s
        is_whole = False
        while not is_whole and time.monotonic() < deadline and is_alive(probe):
            time.sleep(POLL_S)
            # The kernel blocks a signal for the thread that handles it: when no thread blocks it any more, the dump is whole.
            is_whole = os.fstat(file.fileno()).st_size > before and not _holding(probe.pid, number) - blocked
        file.seek(before)
        return file.read().decode(errors="replace"), is_whole


def _holding(pid: int, number: int) -> set[str]:
    """The threads for which the signal is blocked (or handled) or waits, and "all" when it waits for any thread."""
    statuses = {task.name: _status(str(task)) for task in Path(f"/proc/{pid}/task").iterdir()}
    bit = 1 << (number - 1)
    held = {task for task, status in statuses.items() if ((_mask(status, "SigBlk") or 0) | (_mask(status, "SigPnd") or 0)) & bit}
    return held | {"all" for status in statuses.values() if (_mask(status, "ShdPnd") or 0) & bit}


def _no_answer(probe: ProcessProbe, wait_s: float) -> str:
    if not is_alive(probe):
        return GONE
    state = (_stat_fields(probe.pid) or "Z")[0]
    return f"no stacks within {wait_s:g} s: {_STATES.get(state, 'its threads do not take signals')}"


def _oom_kills() -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


# -- stacks as text ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    path: str
    line: str
    name: str

    @property
    def is_runtimes(self) -> bool:
        return bool(_RUNTIME.match(self.path))

    @property
    def is_users(self) -> bool:
        return not self.is_runtimes and not _LIBRARY.match(self.path)

    def __str__(self) -> str:
        return f"{_PREFIX.sub('', self.path)}:{self.line} {self.name}"


@dataclass
class _Thread:
    """Its frames, innermost first."""

    is_current: bool
    """Whether it took the signal, which is the main thread wherever that can."""
    frames: list[_Frame]

    @property
    def is_users(self) -> bool:
        return any(frame.is_users for frame in self.frames)

    def __str__(self) -> str:
        """All that the user's code has called, then the user's code without the frames that only lead to it."""
        called = next((place for place, frame in enumerate(self.frames) if not frame.is_runtimes), 0)
        callers = [frame for frame in self.frames[called:] if not frame.is_runtimes]
        return "\n".join(map(str, [*self.frames[:called], *callers]))


def _threads(dump: str) -> list[_Thread]:
    """The threads of faulthandler's text; of two dumps that overlap, the later."""
    threads: dict[str, _Thread] = {}
    frames: list[_Frame] = []
    for line in dump.splitlines():
        if header := _THREAD.match(line):
            frames = []
            threads[header["id"]] = _Thread(bool(header["current"]), frames)
        elif frame := _FRAME.match(line):
            frames.append(_Frame(**frame.groupdict()))
    return list(threads.values())


def readable_stacks(dump: str) -> str:
    """faulthandler's text of all threads, cut to what `take_stacks` shows; "" when there is no thread in it."""
    threads = _threads(dump)
    shown = [thread for thread in threads if thread.is_users]
    if not shown:  # a worker class of an installed package
        shown = [thread for thread in threads if thread.is_current and not all(frame.is_runtimes for frame in thread.frames)]
    shown.sort(key=lambda thread: not thread.is_current)
    stacks = [str(thread) for thread in shown] or ["no user code is running"]
    return "\n\n".join(stacks) + folded_threads(len(threads) - len(shown)) if threads else ""


def folded_threads(count: int) -> str:
    """The line that stands for that many threads without user code, its line break included; "" for none."""
    return f"\nand {count} thread{'s' * (count > 1)} of the runtime" if count else ""


# -- logs ----------------------------------------------------------------------------------------------------------------


def _split_at_crash(path: str | None) -> tuple[list[str], list[str]]:
    """The lines at a log's end: what was written, and crash reports."""
    written: list[str] = []
    crash: list[str] = []
    in_crash = False
    for line in _tail(path):
        in_crash = bool(_CRASH.match(line) or (in_crash and (_CRASH_GOES_ON.match(line) or _RAY_MARKER.match(line))))
        if not _RAY_MARKER.match(line):
            (crash if in_crash else written).append(line)
    return _without_blank_ends(written), crash


def _tail(path: str | None) -> Iterable[str]:
    if path is None:
        return []
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = _ESCAPES.sub("", text).split("\n")
    if size > TAIL_BYTES and len(lines) > 1:
        lines = lines[1:]  # the first is a piece of one
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def _without_blank_ends(lines: list[str]) -> list[str]:
    full = [place for place, line in enumerate(lines) if line.strip()]
    return lines[full[0] : full[-1] + 1] if full else []


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}... ({len(line)} characters)"
