"""Which columns each step of a trainer reads and writes, and whether the steps fit together.

A driver's step is a plain function of rows: `row_step` states what it reads and writes, and `RowStep.on` fetches exactly that.
A worker's method states it in `@register`; a loss and an estimator add the columns that they read. Nothing repeats it: what is
selected for a call, the check before the start and the table in docs/data.md come from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec

from podium.errors import DataError, RegistrationError, nearest
from podium.protocol import DataProto, Field, column_names, with_padding, without_padding
from podium.single_controller import DataProtoFuture
from podium.single_controller.routing.registration import registration_of
from podium.workers import FIELDS

P = ParamSpec("P")


@dataclass(frozen=True)
class Step:
    """One step of a dataflow."""

    name: str
    reads: tuple[str, ...]
    """The columns that it reads, tensors or objects."""
    writes: tuple[str, ...] | None
    """None for a worker's method that does not declare them: any column may come from it."""
    role: str | None = None
    """The role whose workers do it; None for a step of the driver."""

    def columns_of(self, batch: DataProtoFuture) -> DataProtoFuture:
        """The tensor columns of a batch that a worker's step reads; nothing else is sent."""
        return batch.select(self.reads, [], [])


@dataclass(frozen=True)
class RowStep(Generic[P]):
    """A step of the driver: a function from rows that have the columns `reads` to rows that have the columns `writes`."""

    function: Callable[Concatenate[DataProto, P], DataProto]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __call__(self, rows: DataProto, /, *args: P.args, **kwargs: P.kwargs) -> DataProto:
        return self.function(rows, *args, **kwargs)

    @property
    def step(self) -> Step:
        return Step(self.function.__name__, self.reads, self.writes)

    def with_columns(self, *, reads: Iterable[str] = (), writes: Iterable[str] = ()) -> RowStep[P]:
        """The same step with further columns, such as those that an estimator reads."""
        return replace(self, reads=_joined(self.reads, reads), writes=_joined(self.writes, writes))

    def on(self, batch: DataProtoFuture, /, *args: P.args, **kwargs: P.kwargs) -> DataProtoFuture:
        """Fetch what the step reads of the real rows, and put what it writes into the batch; padding rows get empty values.

        DataError for a column that the batch does not have, and for an answer whose columns are not `writes`.
        """
        lacking = [name for name in self.reads if name not in batch.column_names()]
        if lacking:
            name = self.function.__name__
            raise DataError(f"the step {name!r} reads the column {lacking[0]!r}, which the rows do not have: {batch!r}")
        made = self(without_padding(batch).get(keys=self.reads), *args, **kwargs)
        if column_names(made) != set(self.writes):
            raise DataError(
                f"the step {self.function.__name__!r} must write {', '.join(self.writes)}, got {', '.join(column_names(made))}"
            )
        return batch.drop([name for name in self.writes if name in self.reads]).union(with_padding(made, batch.padding_mask))


def row_step(
    *, reads: Iterable[str], writes: Iterable[str]
) -> Callable[[Callable[Concatenate[DataProto, P], DataProto]], RowStep[P]]:
    """Make a function of rows a step of the driver."""

    def decorate(function: Callable[Concatenate[DataProto, P], DataProto]) -> RowStep[P]:
        return RowStep(function, tuple(reads), tuple(writes))

    return decorate


def worker_step(role: str, method: Callable[..., Any], *, also_reads: Iterable[str] = ()) -> Step:
    """A worker's method as a step: what it declares, and what it reads besides under some settings.

    RegistrationError for a method that is not registered.
    """
    registration = registration_of(method)
    if registration is None:
        raise RegistrationError(f"{method.__qualname__} must be registered to be a step: decorate it with @register")
    return Step(method.__name__, _joined(registration.reads or (), also_reads), registration.writes, role)


def check_dataflow(steps: Sequence[Step], *, optional: Sequence[Step] = (), fields: Mapping[str, Field] = FIELDS) -> None:
    """DataError for the first column that a step reads before another one made it, with the step that would make it.

    `optional` are steps that the trainer would do under other settings. Nothing is checked behind a step that does not declare
    what it writes.
    """
    made: list[str] = []
    for place, step in enumerate(steps):
        for name in step.reads:
            if name not in made:
                raise DataError(_gap(step, name, made, [*steps[place:], *optional], fields))
        if step.writes is None:
            return
        made += [name for name in step.writes if name not in made]


def with_providers(steps: Sequence[Step], providers: Sequence[Step], *, after: str) -> list[Step]:
    """The steps, and behind the one called `after` those providers whose columns are read by any step."""
    read = {name for step in steps for name in step.reads}
    needed = [step for step in providers if read & set(step.writes or ())]
    place = next(number for number, step in enumerate(steps) if step.name == after) + 1
    return [*steps[:place], *needed, *steps[place:]]


def roles_of(steps: Iterable[Step]) -> tuple[str, ...]:
    """The roles that the steps call, in the order of their first call."""
    return tuple(dict.fromkeys(step.role for step in steps if step.role is not None))


def _joined(first: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*first, *more]))


def _gap(step: Step, name: str, made: Sequence[str], rest: Sequence[Step], fields: Mapping[str, Field]) -> str:
    later = [other.name for other in rest if name in (other.writes or ())]
    if later:
        remedy = f"{later[0]} makes it, but does not run before"
    elif name in fields:
        remedy = f"no step of this trainer makes it ({fields[name].kind})"
    else:
        remedy = f"no step makes a column of that name{nearest(name, [*made, *fields])}"
    return (
        f"{step.name} reads the column {name!r}, which no step before makes: {remedy}; made so far: {', '.join(made) or 'none'}"
    )
