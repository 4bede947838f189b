"""The display of a run: one live panel, or, where the output is not a terminal, a line every few seconds.

`Progress` only keeps a snapshot of the run (`View`) and tells its display that it changed; a display decides when to draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podium.observability.names import REWARD, TIMING_PREFIX, TOKENS_PER_S, VALIDATION_SCORE, WARMUP_LOSS

SHOWN: Final[Mapping[str, tuple[str, str]]] = {
    "reward": (REWARD, ".3f"),
    "validation": (VALIDATION_SCORE, ".3f"),
    "loss": (WARMUP_LOSS, ".4f"),
    "tokens/s": (TOKENS_PER_S, ",.0f"),
}
"""Label -> (metric, number format), in the order shown; a metric that was not reported yet is not shown."""

LINE_INTERVAL_S: Final = 5.0
"""Seconds between two lines of the line mode."""
REFRESH_PER_S: Final = 4
"""Redraws of the live panel per second; they happen on a thread of their own."""


@dataclass(frozen=True)
class View:
    """The run at one moment. Replaced as a whole, so that another thread can draw it."""

    phase: str = "starting"
    total_steps: int = 0
    done_before: int = 0
    step: int = 0
    activity: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of every metric of the phase."""
    latest: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step alone."""
    run_started_s: float = 0.0
    phase_started_s: float = 0.0

    def count(self) -> str:
        """Steps done of those of the phase; empty while there is none."""
        return f"{self.step}/{self.total_steps}" if self.total_steps else ""

    def figures(self) -> dict[str, str]:
        """What was reported of `SHOWN`, formatted."""
        return {label: format(self.metrics[name], spec) for label, (name, spec) in SHOWN.items() if name in self.metrics}

    def timings(self) -> str:
        """Seconds per phase of the last step: `rollout 1.2s  update 0.8s`."""
        start = f"{TIMING_PREFIX}/"
        return "  ".join(f"{n.removeprefix(start)} {s:.1f}s" for n, s in self.latest.items() if n.startswith(start))

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the phase ends at its pace so far, or None before its first step."""
        done = self.step - self.done_before
        return (now_s - self.phase_started_s) / done * (self.total_steps - self.step) if done > 0 else None


class Display(Protocol):
    """Draws views: when a step ends (`is_milestone`: worth drawing now, whenever the last drawing was), when another part of a
    step begins (`busy`), and when something else does (`announce`)."""

    def start(self, current: Callable[[], View]) -> None: ...

    def changed(self, view: View, *, is_milestone: bool) -> None: ...

    def busy(self, view: View) -> None: ...

    def announce(self, view: View, text: str) -> None: ...

    def stop(self, view: View) -> None: ...


class Progress:
    """Shows a run on the given console: `with Progress(console) as progress: ...`. Costs microseconds per step.

    Metrics keep their last value until the next phase starts.
    """

    def __init__(self, console: Console, *, title: str = "podium", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._view = View()
        self._display: Display = LiveDisplay(console, title, clock) if console.is_terminal else LineDisplay(console, clock)

    def start_phase(self, name: str, total_steps: int, *, done_steps: int = 0) -> None:
        """A new phase of `total_steps`, of which a resumed run has done some."""
        now = self._clock()
        self._view = View(name, total_steps, done_steps, done_steps, run_started_s=self._view.run_started_s, phase_started_s=now)
        self._display.changed(self._view, is_milestone=True)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` of the phase (counted from 1) is done."""
        self._view = replace(self._view, step=step, metrics={**self._view.metrics, **metrics}, latest=metrics)
        self._display.changed(self._view, is_milestone=step == self._view.total_steps)

    def announce(self, text: str) -> None:
        """Something that may take long begins; said at once."""
        self._view = replace(self._view, activity=text)
        self._display.announce(self._view, text)

    def activity(self, name: str | None) -> None:
        """What runs now; a listener for `Spans`."""
        self._view = replace(self._view, activity=name)
        self._display.busy(self._view)

    def __enter__(self) -> Self:
        now = self._clock()
        self._view = replace(self._view, run_started_s=now, phase_started_s=now)
        self._display.start(lambda: self._view)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._view = replace(self._view, activity=None)
        self._display.stop(self._view)


class LiveDisplay:
    """A panel that redraws itself in place."""

    def __init__(self, console: Console, title: str, clock: Callable[[], float]) -> None:
        self._console, self._title, self._clock = console, title, clock
        self._live: Live | None = None

    def start(self, current: Callable[[], View]) -> None:
        self._live = Live(console=self._console, refresh_per_second=REFRESH_PER_S, get_renderable=lambda: self._panel(current()))
        self._live.start()

    def changed(self, view: View, *, is_milestone: bool) -> None:
        """Nothing to do: the panel draws the current view by itself."""

    def busy(self, view: View) -> None:
        """Nothing to do either."""

    def announce(self, view: View, text: str) -> None:
        """Nothing to do either."""

    def stop(self, view: View) -> None:
        if self._live is not None:
            self._live.stop()

    def _panel(self, view: View) -> RenderableType:
        now = self._clock()
        left = view.left_s(now)
        clock = f"{_duration(now - view.run_started_s)} elapsed" + (f", {_duration(left)} left" if left else "")
        body = [_bar(view), _figures(view)]
        if timings := view.timings():
            body.append(Text(timings, style="dim"))
        title, subtitle = Text(self._title), Text(clock)  # a str would be read as markup
        return Panel(Group(*body), title=title, title_align="left", subtitle=subtitle, subtitle_align="right")


class LineDisplay:
    """A line at each phase's start and end, and between them one every few seconds, so that a log stays readable.

    A step's numbers are written when it ends. A step that takes longer says in between what it is at, without numbers: those
    would be the last step's.
    """

    def __init__(self, console: Console, clock: Callable[[], float], *, interval_s: float = LINE_INTERVAL_S) -> None:
        self._console, self._clock, self._interval_s = console, clock, interval_s
        self._last_s = self._last_step_s = float("-inf")
        self._last_line = ""

    def start(self, current: Callable[[], View]) -> None:
        """Nothing to say yet: the first phase's start is the first line."""
        self._last_s = self._last_step_s = self._clock()

    def changed(self, view: View, *, is_milestone: bool) -> None:
        if is_milestone or self._clock() - self._last_step_s >= self._interval_s:
            self._write(view)

    def busy(self, view: View) -> None:
        if view.activity and self._clock() - self._last_s >= self._interval_s:
            self._print(view, f"{view.phase} {view.count()}".rstrip() + f" | now {view.activity}")

    def announce(self, view: View, text: str) -> None:
        self._print(view, text)

    def stop(self, view: View) -> None:
        self._write(view)

    def _write(self, view: View) -> None:
        self._last_step_s = self._clock()
        parts = [f"{view.phase} {view.count()}".rstrip()]
        parts += [f"{label} {value}" for label, value in view.figures().items()]
        parts += [timings] if (timings := view.timings()) else []
        line = " | ".join(parts)
        if line != self._last_line:
            self._last_line = line
            self._print(view, line)

    def _print(self, view: View, text: str) -> None:
        self._last_s = self._clock()
        stamp = _duration(self._last_s - view.run_started_s)
        self._console.print(f"[{stamp}] {text}", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _bar(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(view.total_steps, 1), completed=view.step, width=32)
    row.add_row(Text(view.phase, style="bold"), bar, Text(view.count()), Text(view.activity or "", style="cyan"))
    return row


def _figures(view: View) -> RenderableType:
    text = Text()
    for label, value in view.figures().items():
        text.append(f"{label} ", style="dim").append(f"{value}   ", style="bold")
    return text


def _duration(seconds: float) -> str:
    """`mm:ss`, or `h:mm:ss` from an hour on."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
