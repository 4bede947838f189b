"""Profiling of ranks: which of them record, with what, for which stretch, and what is run when the last one is recorded.

The driver says when (`start_profile`, `stop_profile`, through `DistProfilerExtension`); the recording itself is a tool's
(`profiler_tools`). This is in `workers`, the lowest package that may both register methods and ask `engines.device`.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from podium.config import ProfilerConfig
from podium.errors import ProfilerError
from podium.single_controller import Dispatch, register
from podium.workers.profiler_tools import Tool, build_tool

F = TypeVar("F", bound=Callable[..., Any])
FINISH_TIMEOUT_S = 600.0
"""Most seconds of the finish command, for which the rank, and so the run, waits: it may upload some GB."""
LAST_CHARS = 2_000
"""How much of a failed finish command's output is logged."""


def _nobody() -> None:
    return None


class DistProfiler:
    """The profiler of one rank: off unless the config has a tool and means this rank. Then `start` and `stop` enclose a stretch.

    Ranks are those of `config.ranks`, all with `config.all_ranks`, and rank 0 where neither is said. One profiler of a process
    runs at a time.
    """

    _running: ClassVar[Callable[[], DistProfiler | None]] = _nobody
    """The one that runs in this process, as a weak reference: it is over with the worker that has it."""

    def __init__(
        self,
        rank: int,
        config: ProfilerConfig | None = None,
        tool_config: Mapping[str, object] | None = None,
        save_file_prefix: str | None = None,
    ) -> None:
        """`tool_config` takes the place of the config's; the files' names begin with `save_file_prefix`.

        ConfigError for options that the tool has not, and where it needs a GPU that is not there.
        """
        self.rank, self.config = rank, config or ProfilerConfig()
        self._prefix = f"{save_file_prefix}-" if save_file_prefix else ""
        self._tool: Tool | None = None
        if self.config.tool != "none" and (self.config.all_ranks or rank in (self.config.ranks or (0,))):
            self._tool = build_tool(self.config.tool, self.config.tool_config if tool_config is None else tool_config)
        self._num_started = 0
        self._name = self._role = ""
        self._thread = 0

    @property
    def is_enabled(self) -> bool:
        """Whether this rank is one that records."""
        return self._tool is not None

    @property
    def is_running(self) -> bool:
        """Whether it records right now."""
        return DistProfiler._running() is self

    def start(self, role: str = "", profile_step: int | None = None) -> None:
        """Begin to record; the file is named after the step, or counted.

        ProfilerError where one runs in this process already, and where there can be no folder `config.save_path`.
        """
        if self._tool is None:
            return
        if (other := DistProfiler._running()) is not None:
            raise ProfilerError(
                f"rank {self.rank} cannot be profiled: in its process the profiler of rank {other.rank} runs. Groups that share "
                "processes are profiled through one of them, ranks that share one (runtime inline) one at a time"
            )
        self._make_folder()  # before anything is recorded: what is not stopped goes on recording
        self._num_started += 1
        stretch = f"step-{profile_step}" if profile_step is not None else f"part-{self._num_started}"
        self._name, self._role = f"{self._prefix}{stretch}-rank-{self.rank}", role
        self._tool.start()
        self._thread = threading.get_ident()
        DistProfiler._running = weakref.ref(self)

    def step(self) -> None:
        """A step ends within the stretch; the tool may mark it."""
        if self._tool is not None and self.is_running:
            self._tool.step()

    def stop(self, *, run_command: bool = False) -> None:
        """Write the file into `config.save_path`, then run the finish command if it is asked for.

        ProfilerError where none was started, on another thread than the one that started it, which torch's profiler does not
        survive, and where the command fails: the file is written all the same.
        """
        if self._tool is None:
            return
        if not self.is_running:
            raise ProfilerError(f"no profile runs on rank {self.rank}: start_profile() comes before stop_profile()")
        if threading.get_ident() != self._thread:
            raise ProfilerError(f"the profile of rank {self.rank} was started on another thread: it goes on, stop it on that one")
        DistProfiler._running = _nobody
        folder = self._make_folder()
        self._tool.stop(folder / self._name)
        if run_command and self.config.finish_command is not None:
            self._finish(self.config.finish_command, folder)

    def range(self, name: str) -> AbstractContextManager[object]:
        """A block that has this name in the recording; nothing where none runs."""
        return self._tool.range(name) if self._tool is not None and self.is_running else nullcontext()

    @staticmethod
    def annotate(
        message: str | None = None,
        *,
        role: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
    ) -> Callable[[F], F]:
        """Give a method of a worker a name in the recordings of `self.profiler`: the message, the role, or else its own.

        The method's signature, its `@register` (above or below) and what it raises stay. `color`, `domain` and `category` are
        taken so that verl's lines may stay: no tool here shows them.
        """

        def decorate(method: F) -> F:
            name = message or role or method.__name__
            if inspect.iscoroutinefunction(method):

                @wraps(method)
                async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
                    with _range_of(self, name):
                        return await method(self, *args, **kwargs)

                return cast(F, awaited)

            @wraps(method)
            def called(self: Any, *args: Any, **kwargs: Any) -> Any:
                with _range_of(self, name):
                    return method(self, *args, **kwargs)

            return cast(F, called)

        return decorate

    def _make_folder(self) -> Path:
        folder = Path(self.config.save_path).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfilerError(f"rank {self.rank} cannot make the folder profiler.save_path: {error}; give another") from error
        return folder

    def _finish(self, command: str, folder: Path) -> None:
        values = {"SAVE_PATH": folder, "TOOL": self.config.tool, "RANK": self.rank, "PID": os.getpid(), "ROLE": self._role}
        variables = [f"PODIUM_PROFILE_{name}={value}" for name, value in values.items()]
        try:
            ended = subprocess.run(  # `env` adds to the environment, which so need not be read here
                ["env", *variables, "sh", "-c", command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=FINISH_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            last_output, how = error.stdout, f"was ended after {FINISH_TIMEOUT_S:g} s"
        else:
            if ended.returncode == 0:
                return
            last_output, how = ended.stdout, f"ended with {ended.returncode}"
        output = (last_output or b"").decode(errors="backslashreplace")[-LAST_CHARS:].strip()
        raise ProfilerError(
            f"profiler.finish_command {how} on rank {self.rank}: {command!r}. The recordings are in {folder}. "
            f"The command wrote: {output or 'nothing'}"
        )


def _range_of(worker: object, name: str) -> AbstractContextManager[object]:
    profiler = getattr(worker, "profiler", None)
    return profiler.range(name) if isinstance(profiler, DistProfiler) else nullcontext()


class DistProfilerExtension:
    """What a worker class derives from, beside `Worker`, so that the driver may profile its ranks.

    Its constructor calls `DistProfilerExtension.__init__(self, DistProfiler(self.rank, config))`. Groups that share processes are
    driven through one of them.
    """

    profiler: DistProfiler | None = None

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, role: str = "", profile_step: int | None = None) -> None:
        """Begin to record, on the ranks that are meant: see `DistProfiler.start`."""
        self._known_profiler().start(role, profile_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self, run_command: bool = True) -> None:
        """Write what was recorded, and run the finish command, which is meant for after the last stretch: else say False."""
        self._known_profiler().stop(run_command=run_command)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step_profile(self) -> None:
        """Mark that a step ends within what is recorded."""
        self._known_profiler().step()

    def _known_profiler(self) -> DistProfiler:
        if self.profiler is None:
            raise ProfilerError(
                f"{type(self).__name__} has no profiler: its constructor calls DistProfilerExtension.__init__(self, profiler)"
            )
        return self.profiler
