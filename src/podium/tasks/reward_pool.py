"""Processes that score, each one response at a time, killed and replaced when a response takes too long or takes one down.

Why not a library's pool: `concurrent.futures` and `multiprocessing.Pool` cannot end one stuck worker, and their children import
the driver's `__main__`. pebble kills workers, with threads and locks in the driver for a scheduler that scoring does not need.
Here each process has a pipe of its own, so that killing it can damage nothing that others use, and one loop waits on all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Self

from podium.errors import ConfigError, RewardError
from podium.tasks.attempts import Attempts
from podium.tasks.last_words import LastWords, last_words
from podium.tasks.outcomes import Failed
from podium.tasks.reward_process import FunctionSpec, Ready, Reply, Request, Unusable

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Most seconds until a process has imported the user's module."""
ABORT_S = 0.5
"""Seconds that a stuck process gets to say where it is."""
LOG_TAIL_BYTES = 64 * 1024
"""The last bytes of a dead process's output that are read: a crash report of many frames, and what was printed before."""
MAX_LOGGED_TIMEOUTS = 3
"""Timeouts of a batch that are logged one by one; the rest are counted."""
MAX_SHORT_FRAME = 2**31 - 1
"""Bytes of a message whose length stands in four of them."""
BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from podium.tasks.reward_process import main; main()"
"""What a fresh interpreter runs: the driver's import path first, for a checkout that is not installed."""


class _Process:
    """One process and, while it scores, the row it is at.

    Its output goes to a file of its own, never to the driver's terminal, and is appended to the log at its end: so the last
    lines of a process are its own.
    """

    def __init__(self, spec: FunctionSpec, log: Path | None) -> None:
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        self._log, self._output = log, _output_file(log)
        command = [sys.executable, "-P", "-u", "-c", BOOTSTRAP, str(theirs.fileno()), str(lifeline), json.dumps(sys.path)]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), lifeline),
            start_new_session=True,  # Ctrl-C is the driver's to handle, and killing takes grandchildren along
        )
        theirs.close()
        os.close(lifeline)
        self.is_ready, self.row = False, -1
        self.deadline_s = time.monotonic() + START_LIMIT_S
        with contextlib.suppress(OSError):  # it died at once, or does not listen; the wait will tell
            _send(self.connection, _framed(spec), START_LIMIT_S)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.row < 0

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def give(self, row: int, frame: bytes, limit_s: float) -> None:
        """Start on a row. TimeoutError when the process does not take it within the limit, another OSError when it is gone."""
        _send(self.connection, frame, limit_s)
        self.row, self.deadline_s = row, time.monotonic() + limit_s

    def abort(self) -> LastWords:
        """End a process that is stuck: where it was, by the traceback that it dumps on SIGABRT even from within a C loop."""
        start = self._output.seek(0, os.SEEK_END)
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(self.pid, signal.SIGABRT)
            self._popen.wait(timeout=ABORT_S)
        return self.end(said_since=start)

    def end(self, said_since: int = 0) -> LastWords:
        """Kill the process and what it started, and wait until it is gone; the last that it wrote."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self.connection.close()
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self._lifeline = -1
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(said_since, size - LOG_TAIL_BYTES))
        tail = self._output.read().decode("utf-8", "replace")
        self._keep_output()
        return last_words(tail)

    def _keep_output(self) -> None:
        if self._log is not None:
            self._output.seek(0)
            with self._log.open("ab") as log:
                shutil.copyfileobj(self._output, log)
            Path(self._output.name).unlink(missing_ok=True)
        self._output.close()

    def exit_code(self) -> int | None:
        """The exit code of a process that closed its pipe; None when it lives on for half a second all the same."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout=0.5)
        return None


class RewardPool:
    """`num_workers` processes with a user's reward function. A context manager: they are gone when it is left.

    Started by `start`, or by the first `score`; reused from call to call.
    """

    def __init__(self, spec: FunctionSpec, *, num_workers: int, timeout_s: float, log: Path | None = None) -> None:
        """`log` takes what each process printed, when it ends; without one, only the error of a process that dies has it."""
        self._spec, self._num_workers, self._timeout_s, self._log = spec, num_workers, timeout_s, log
        self._processes: list[_Process] = []
        self._num_timeouts = 0
        """Responses of the present batch that took too long."""
        self._num_idle_deaths = 0
        """Processes that died while they started or had no row, since the last score; there is a limit to such replacements."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that live now."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start what is missing; returns at once, while the processes import."""
        while len(self._processes) < self._num_workers:
            self._processes.append(_Process(self._spec, self._log))

    def wait_until_ready(self) -> None:
        """Wait until every process has imported the function. ConfigError says why one could not."""
        self.start()
        try:
            while not all(process.is_ready for process in self._processes):
                self._step(Attempts(0))
        except BaseException:
            self.close()
            raise

    def score(self, requests: Sequence[Request], attempts: Attempts) -> None:
        """Score the rows that wait in `attempts`, until each has its outcome or the batch is stopped; row r is `requests[r]`.

        A request that fails leaves the others as they are. What is being scored when the batch is stopped is killed.
        RewardError when the function cannot be loaded any more: that concerns no row.
        """
        self.start()
        self._num_timeouts = 0
        try:
            while not attempts.is_stopped and (attempts.is_waiting or self._busy):
                self._hand_out(requests, attempts)
                if not attempts.is_stopped:
                    self._step(attempts)
        except BaseException as exc:
            self.close()  # what the processes are at belongs to a call that is over
            if isinstance(exc, ConfigError):
                raise RewardError(f"a process of the reward function could not be replaced: {exc}") from exc
            raise
        for process in self._busy:
            self._processes.remove(process)
            process.end()
        if self._num_timeouts > MAX_LOGGED_TIMEOUTS:
            logger.warning("%d more timed out after %g s", self._num_timeouts - MAX_LOGGED_TIMEOUTS, self._timeout_s)

    def close(self) -> None:
        """End all processes, whatever they are doing, and wait until they are gone. May be called again."""
        while self._processes:
            self._processes.pop().end()

    # -- one turn of the loop -----------------------------------------------------------------------------------------

    @property
    def _busy(self) -> list[_Process]:
        """The processes that are at a row."""
        return [process for process in self._processes if process.row >= 0]

    def _hand_out(self, requests: Sequence[Request], attempts: Attempts) -> None:
        for process in list(self._processes):
            if attempts.is_waiting and process.is_idle and process.is_alive:
                row = attempts.take()
                try:
                    process.give(row, _framed(requests[row]), self._timeout_s)
                except TimeoutError:
                    self._processes.remove(process)
                    reason = f"the reward process did not take its response within reward.timeout_s ({self._timeout_s:g} s)"
                    attempts.settle(row, Failed(reason, str(process.abort())))
                    self.start()
                except OSError:  # died while it was idle: the row has not begun
                    attempts.give_back(row)
                except (pickle.PicklingError, TypeError, AttributeError) as exc:
                    attempts.settle(row, Failed(f"cannot be called: its arguments cannot be pickled: {exc}"))

    def _step(self, attempts: Attempts) -> None:
        """Wait for replies, ends and deadlines, and take them in."""
        timed = [process for process in self._processes if not process.is_idle]
        if not timed and not attempts.is_waiting:
            return
        left_s = min((process.deadline_s for process in timed), default=time.monotonic()) - time.monotonic()
        connections = {process.connection: process for process in self._processes}
        for connection in wait(list(connections), timeout=max(0.0, left_s)):
            assert isinstance(connection, Connection)
            self._hear(connections[connection], attempts)
        now_s = time.monotonic()
        for process in list(self._processes):
            if process.is_idle and not process.is_alive:  # its end may be hidden: what it forked can hold the pipe open
                self._bury(process, attempts)
            elif not process.is_idle and now_s >= process.deadline_s and not process.connection.poll():
                self._give_up(process, attempts)

    def _hear(self, process: _Process, attempts: Attempts) -> None:
        try:
            reply: Reply = process.connection.recv()
        except (EOFError, OSError):
            self._bury(process, attempts)
            return
        if isinstance(reply, Unusable):
            raise ConfigError(reply.message)
        if isinstance(reply, Ready):
            process.is_ready = True
            return
        attempts.settle(process.row, reply)
        process.row = -1
        self._num_idle_deaths = 0

    def _bury(self, process: _Process, attempts: Attempts) -> None:
        """The process closed its pipe: it died, or the function closed what it should not."""
        exit_code = process.exit_code()
        self._processes.remove(process)
        tail = process.end()
        how = "closed its connection" if exit_code is None else _end_of(exit_code)
        if process.row >= 0:
            attempts.settle(process.row, Failed(f"the reward process {how}", str(tail)))
        else:
            self._num_idle_deaths += 1
            if self._num_idle_deaths > self._num_workers:
                when = "idle" if process.is_ready else f"importing {self._spec.name}"
                raise ConfigError(f"reward.function: one process after another {how} while {when}\n{tail}".rstrip())
            logger.warning("a reward process %s without a response to score, and is replaced", how)
        self.start()

    def _give_up(self, process: _Process, attempts: Attempts) -> None:
        self._processes.remove(process)
        tail = process.abort()
        if not process.is_ready:
            raise ConfigError(
                f"reward.function: the import of {self._spec.name} hangs: it had not ended after {START_LIMIT_S:g} s. A module "
                "defines its functions and returns; what waits or takes long belongs into the function, under reward.timeout_s\n"
                f"{tail}".rstrip()
            )
        self._tell_timeout(process.row, tail.place)
        attempts.settle(process.row, Failed(f"took longer than reward.timeout_s ({self._timeout_s:g} s)", str(tail)))
        if not attempts.is_stopped:
            self.start()

    def _tell_timeout(self, row: int, place: str) -> None:
        """Log a timeout at once, so that a batch of rows that all hang does not wait in silence."""
        self._num_timeouts += 1
        if self._num_timeouts <= MAX_LOGGED_TIMEOUTS:
            logger.warning("row %d timed out after %g s%s", row, self._timeout_s, f" at {place}" if place else "")


def _output_file(log: Path | None) -> IO[bytes]:
    """A file for what one process writes: beside the log, to be read while it lives, or without one nameless."""
    if log is None:
        return tempfile.TemporaryFile()
    return tempfile.NamedTemporaryFile(prefix=f"{log.stem}-", suffix=log.suffix, dir=log.parent, delete=False)


def _framed(message: Request | FunctionSpec) -> bytes:
    """The message as `Connection.send` writes it."""
    body = bytes(ForkingPickler.dumps(message))
    return struct.pack("!i", len(body)) + body if len(body) <= MAX_SHORT_FRAME else struct.pack("!iQ", -1, len(body)) + body


def _send(connection: Connection, frame: bytes, limit_s: float) -> None:
    """`Connection.send` with a limit: a process that does not read blocks it once the pipe's buffer is full.

    Raises TimeoutError; then part of the frame may be sent, and the process is of no more use.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        channel.settimeout(limit_s)
        try:
            channel.sendall(frame)
        finally:
            channel.settimeout(None)  # the mode belongs to the pipe's end, not to this copy of it


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"
