"""Every error that Podium raises on purpose.

One tree, so that a driver can catch `PodiumError`; each leaf also subclasses the stdlib type that a caller would expect
(ValueError, TimeoutError, ...). All of them pickle with their attributes, because most are born in another process.
A message says what is wrong, the value got, what would be right, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self


class PodiumError(Exception):
    """Root of the tree. Picklable: attributes set by a subclass travel with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[PodiumError], args: tuple[Any, ...], state: dict[str, Any]) -> PodiumError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(PodiumError, ValueError):
    """A setting is unknown, has the wrong type, or cannot work with the others. The command line exits with 2."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is needed by what was asked for; the message carries the pip line."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f'not installed: {package}, for {needed_for}. pip install -e ".[{extra}]" in a clone of Podium brings it'
        )


class DataError(PodiumError, ValueError, AssertionError):
    """A batch, a column or a row is not what the operation needs.

    An AssertionError too, since that is what drivers written for verl catch.
    """


class UnknownNameError(DataError, KeyError):
    """A column or a value of the meta was asked for by a name that the batch does not have."""

    __str__ = PodiumError.__str__  # a KeyError would show the message in quotes


class ChunkError(DataError):
    """`DataProto.chunk` was asked for parts of equal size that the row count does not allow."""


class TaskError(PodiumError, ValueError):
    """A task cannot be built, or its data does not have what a split needs."""


class RewardError(PodiumError, RuntimeError):
    """A reward or verifier raised or returned nonsense; the message names the row. Never scored as zero in silence."""


class RegistrationError(PodiumError, TypeError):
    """`@register` was used on a method, or with a mode, that cannot work."""


class DispatchError(PodiumError, ValueError):
    """The arguments or the results of a group call do not fit the method's dispatch mode."""


class UnsupportedByRuntime(PodiumError, NotImplementedError):  # noqa: N818 - the name the docs use
    """The chosen runtime cannot do this; the message names one that can."""


class ResourceError(PodiumError, RuntimeError):
    """A resource pool asks for more than there is."""


class NoRoomError(ResourceError):
    """The nodes cannot hold the ranks. The message is in the words of a pool; the attributes are for a caller's own words."""

    def __init__(
        self, message: str, *, need: str, table: str, free: tuple[int, ...], total: tuple[int, ...], scarce: tuple[str, ...]
    ) -> None:
        """need: what each rank takes. table: the nodes, and who holds what. free, total: how many ranks each node can hold now,
        and with nothing held. scarce: the resources that would not suffice even alone."""
        super().__init__(message)
        self.need, self.table, self.free, self.total, self.scarce = need, table, free, total, scarce


class GroupClosedError(PodiumError, RuntimeError):
    """A call on a worker group that was closed or is broken."""


class CallTimeoutError(PodiumError, TimeoutError):
    """A group call did not finish in time; `silent_ranks` had not answered."""

    def __init__(self, message: str, *, silent_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.silent_ranks = silent_ranks


@dataclass(frozen=True)
class Origin:
    """Where a worker's failure happened."""

    group: str
    method: str
    rank: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"group {self.group!r}, method {self.method!r}, rank {self.rank}, node {self.node}, pid {self.pid}"


class WorkerError(PodiumError, RuntimeError):
    """A rank raised. Carries where (`origin`), what (`cause_type`, `cause_message`) and the remote traceback.

    `consequences` are the failures of other ranks in the same call, the cause itself left out. `last_words` is what the
    rank's process wrote last, and of one that crashed where it was.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        cause_type: str,
        cause_message: str,
        remote_traceback: str,
        consequences: tuple[str, ...] = (),
        last_words: str = "",
    ) -> None:
        self.origin = origin
        self.cause_type = cause_type
        self.cause_message = cause_message
        self.remote_traceback = remote_traceback
        self.consequences = consequences
        self.last_words = last_words
        folded = "".join(f"\n  also: {line}" for line in consequences)
        behind = "\n".join(part.rstrip() for part in (remote_traceback, last_words) if part)
        super().__init__(f"{cause_type}: {cause_message}\n  in {origin}{folded}\n{behind}".rstrip())

    def explained(self, consequences: tuple[str, ...], last_words: str) -> Self:
        """The same error with what was learnt after it happened."""
        if not consequences and not last_words:
            return self
        error = type(self)(
            self.origin,
            cause_type=self.cause_type,
            cause_message=self.cause_message,
            remote_traceback=self.remote_traceback,
            consequences=consequences,
            last_words=last_words,
        )
        error.__cause__ = self.__cause__
        return error


class WorkerLostError(WorkerError):
    """A rank's process ended. The message has the exit code where the runtime knows it."""


class EngineError(PodiumError, RuntimeError):
    """A training engine cannot do what was asked, or its numbers are not finite any more."""


class RolloutError(PodiumError, RuntimeError):
    """A rollout engine cannot do what was asked."""


class StaleWeightsError(RolloutError):
    """The rollout's weights are older than the trainer's: `update_weights()` was not called after an update."""


class ProfilerError(PodiumError, RuntimeError):
    """A profile cannot be started or stopped, or the command that follows it failed."""


class CheckpointError(PodiumError, RuntimeError):
    """A checkpoint is missing, partial or damaged; the message names the file and the reason."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest of the known names, or an empty string.

    >>> nearest("spell_bakward", ["spell_backward", "chain_sum"])
    "; did you mean 'spell_backward'?"
    """
    match = get_close_matches(str(word), list(map(str, known)), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_kind(
    name: str, value: object, kinds: type | tuple[type, ...], expected: str, error: type[PodiumError] = ConfigError
) -> None:
    """The error, by default ConfigError, for a value of a kind that it cannot have.

    >>> check_kind("detached", "no", bool, "True or False")
    Traceback (most recent call last):
    podium.errors.ConfigError: detached must be True or False, got 'no'
    """
    if not isinstance(value, kinds):
        raise error(f"{name} must be {expected}, got {value!r}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not in a table: the nearest one first, then all of them.

    >>> unknown_name("recipe", "spel", ["spell"])
    "unknown recipe 'spel'; did you mean 'spell'? Known: spell"
    """
    names = sorted(known)
    hint = nearest(name, names)
    return f"unknown {kind} {name!r}{hint or '.'} Known: {', '.join(names) or 'none'}"
