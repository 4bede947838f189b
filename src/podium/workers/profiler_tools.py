"""What a profiler of a rank may record with. A tool is started, writes one file when it is stopped, and names blocks meanwhile.

What is not here: which ranks and steps are profiled (`profiling`), and any code that names a GPU (`engines.device`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from podium.engines import device
from podium.errors import ConfigError, check_kind, unknown_name

Options = Mapping[str, object]
MAX_ALLOCATIONS = 100_000
"""Of which the memory snapshot tells: some tens of MB, and several steps of a large model."""


class Tool(Protocol):
    """One recorder, used for one stretch of the program after another."""

    def start(self) -> None: ...

    def stop(self, path: Path) -> None:
        """End, and write what was recorded to the path with the tool's own suffix."""
        ...

    def step(self) -> None:
        """A step ends and the next begins."""
        ...

    def range(self, name: str) -> AbstractContextManager[object]:
        """A block that has this name in the recording."""
        ...


class TorchTool:
    """torch.profiler: a trace for Perfetto or chrome://tracing, `.json.gz`. It records the thread that starts it."""

    OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")

    def __init__(self, options: Options) -> None:
        for name, value in _known("torch", options, self.OPTIONS).items():
            check_kind(f"tool_config.{name}", value, bool, "true or false")
        self._flags: dict[str, Any] = dict(options)
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=device.profiled_activities(), schedule=_always, **self._flags)
        self._profile.start()

    def stop(self, path: Path) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None, "stop follows start"
        profile.stop()
        profile.export_chrome_trace(f"{path}.json.gz")

    def step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name)


class TorchMemoryTool:
    """Allocations of GPU memory, `.pickle`, for https://pytorch.org/memory_viz. Has not been run on a GPU by this project."""

    OPTIONS = ("max_entries",)

    def __init__(self, options: Options) -> None:
        most = _known("torch_memory", options, self.OPTIONS).get("max_entries", MAX_ALLOCATIONS)
        if type(most) is not int or most < 1:
            raise ConfigError(f"tool_config.max_entries must be a number of allocations, 1 or more, got {most!r}")
        _require_gpu("torch_memory")
        self._most = most

    def start(self) -> None:
        device.record_allocations(self._most)

    def stop(self, path: Path) -> None:
        device.write_allocations(path.with_name(f"{path.name}.pickle"))

    def step(self) -> None: ...

    def range(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()  # a snapshot has the stack of every allocation instead


class NsysTool:
    """Opens the capture of an `nsys profile --capture-range=cudaProfilerApi` around the rank, which writes its file itself.

    Has never been run by this project.
    """

    def __init__(self, options: Options) -> None:
        _known("nsys", options, ())
        _require_gpu("nsys")

    def start(self) -> None:
        device.open_capture()

    def stop(self, path: Path) -> None:
        device.close_capture()

    def step(self) -> None: ...

    def range(self, name: str) -> AbstractContextManager[object]:
        return device.named_range(name)


TOOLS: dict[str, Callable[[Options], Tool]] = {"torch": TorchTool, "torch_memory": TorchMemoryTool, "nsys": NsysTool}


def build_tool(name: str, options: Options) -> Tool:
    """A tool by its name. ConfigError for an unknown one, options that it has not, and where it needs a GPU that is not there."""
    if name not in TOOLS:
        raise ConfigError(unknown_name("profiler tool", name, [*TOOLS, "none"]))
    return TOOLS[name](options)


def _always(step: int) -> torch.profiler.ProfilerAction:
    return torch.profiler.ProfilerAction.RECORD  # what it says without a schedule too, but then no steps are marked


def _known(tool: str, options: Options, names: tuple[str, ...]) -> Options:
    for name in options:
        if name not in names:
            raise ConfigError(unknown_name(f"option of the profiler tool {tool!r},", name, names))
    return options


def _require_gpu(tool: str) -> None:
    if not device.has_gpu():
        raise ConfigError(
            f"profiler.tool={tool} needs CUDA, and torch sees no GPU: use profiler.tool=torch, which records a CPU too"
        )
