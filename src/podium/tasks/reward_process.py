"""A process that scores: loads the user's reward function once, then answers one request after another until its driver is gone.

Runs as a fresh interpreter that knows nothing of the driver's `__main__`; imports neither torch nor transformers itself. It talks
through two inherited file descriptors: requests and replies, and a lifeline whose other end only the driver holds. A guardian
waits on the lifeline; it is a process and no thread, for a thread waits for the GIL, which a stuck C loop does not let go.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from pydantic import JsonValue

from podium.errors import ConfigError, nearest
from podium.parts.source import SourceFile, absolute_path
from podium.tasks.outcomes import Failed, Outcome, outcome_of

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's names; the function is called with them as keyword arguments."""
MAX_TRACEBACK = 4000
"""Characters of a traceback that travel: its end says what happened."""

RewardFunction: TypeAlias = Callable[..., object]


@dataclass(frozen=True)
class FunctionSpec:
    """`reward.function` and `reward.kwargs`, or the like for a task's own verifier."""

    name: str
    kwargs: Mapping[str, JsonValue]
    text: str | None = None
    """Of the file that the name has a path of, as the run has stored it; None reads the file."""
    prepare: str | None = None
    """A function beside it that is called once with the kwargs, before the first response and outside its time limit."""


@dataclass(frozen=True)
class Request:
    """The arguments for one response."""

    data_source: str
    solution_str: str
    ground_truth: JsonValue
    extra_info: Mapping[str, JsonValue]


@dataclass(frozen=True)
class Ready:
    """The process has its function."""


@dataclass(frozen=True)
class Unusable:
    """The function cannot be had; the message says why."""

    message: str


Reply: TypeAlias = Ready | Unusable | Outcome


def main() -> None:
    """Entry point: `argv` holds the two descriptors; the first message is the `FunctionSpec`."""
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    faulthandler.enable(all_threads=False)  # a crash, or the abort of a response that takes too long, tells its Python line
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _start_guardian(connection, lifeline)
    loop = asyncio.new_event_loop()
    spec: FunctionSpec = connection.recv()
    try:
        function = load_function(spec)
    except ConfigError as exc:
        connection.send(Unusable(str(exc)))
        return
    connection.send(Ready())
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(function, request, spec.kwargs, loop))


def load_function(spec: FunctionSpec) -> RewardFunction:
    """The function that a config names. ConfigError for a missing file, module or function, an import that fails, a wrong
    signature."""
    module_name, separator, name = spec.name.rpartition(":" if ":" in spec.name else ".")
    try:
        module = _module_of_file(Path(module_name), spec.text) if separator == ":" else _module_of_name(module_name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"reward.function: importing {module_name} failed: {type(exc).__name__}: {exc}\n{_traceback(exc)}"
        ) from exc
    function = getattr(module, name, None)
    if function is None:
        names = sorted(public for public, value in vars(module).items() if callable(value) and not public.startswith("_"))
        raise ConfigError(f"reward.function: {module_name} has no function {name!r}{nearest(name, names)}")
    if not callable(function):
        raise ConfigError(f"reward.function: {name} in {module_name} is {function!r}, not a function")
    _check_signature(function, spec)
    if spec.prepare is not None:
        getattr(module, spec.prepare)(**spec.kwargs)
    loaded: RewardFunction = function
    return loaded


def _module_of_file(path: Path, text: str | None) -> ModuleType:
    """The module in a file; modules beside it can be imported, as when the file is run as a script."""
    try:
        file = SourceFile.read(str(path)) if text is None else SourceFile(absolute_path(str(path)), text)
    except ConfigError as exc:
        raise ConfigError(f"reward.function: {exc}") from exc
    sys.path.insert(0, str(Path(file.path).parent))
    return file.module()


def _module_of_name(name: str) -> ModuleType:
    if not name.startswith("podium."):  # a file beside the run must not stand in for a module that our own imports
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise ConfigError(
            f"reward.function: no module {exc.name!r}; for a file write path/to/file.py:function"
            f" (a package is looked for in {Path.cwd()} and where Python's packages are)"
        ) from exc


def _check_signature(function: RewardFunction, spec: FunctionSpec) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins do not tell
        return
    if clash := sorted(spec.kwargs.keys() & set(ARGUMENTS)):
        raise ConfigError(f"reward.kwargs: {', '.join(clash)} is given by Podium, not by a setting")
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **spec.kwargs)
    except TypeError as exc:
        wanted = ", ".join((*ARGUMENTS, *spec.kwargs))
        raise ConfigError(
            f"reward.function: {spec.name}{signature} cannot be called with the keyword arguments ({wanted}; more by "
            f"reward.kwargs): {exc}"
        ) from exc


def _outcome(
    function: RewardFunction, request: Request, kwargs: Mapping[str, JsonValue], loop: asyncio.AbstractEventLoop
) -> Outcome:
    try:
        result = function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=dict(request.extra_info),
            **kwargs,
        )
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_awaited(result))
        return outcome_of(result)
    except (Exception, SystemExit) as exc:  # the rim of the process: reported with its traceback, by the driver's policy
        return Failed(f"raised {type(exc).__name__}: {exc}", _traceback(exc))


async def _awaited(result: object) -> object:
    return await result  # type: ignore[misc]


def _traceback(exc: BaseException) -> str:
    """The traceback from the user's own first line on."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(exc), exc, frames))[-MAX_TRACEBACK:].rstrip()


def _is_ours(filename: str) -> bool:
    return filename in (__file__, inspect.getsourcefile(SourceFile)) or filename.startswith(
        ("<frozen importlib", str(Path(importlib.__file__).parent))
    )


def _start_guardian(connection: Connection, lifeline: int) -> None:
    """A process that ends this process group, and itself with it, when the driver is gone, whatever the reward function is doing.

    What the function started goes along. (PR_SET_PDEATHSIG would end one process alone, and also when only the driver's thread
    that started it ends.) When the driver ends the group, so does the guardian. Forked twice, so that a
    reward function's `os.wait` does not find it among its children.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(lifeline)
        return
    if os.fork() == 0:
        connection.close()  # else the driver could not tell by it that this process has ended
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
