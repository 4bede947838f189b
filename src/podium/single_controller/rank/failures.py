"""Describe what a rank's code raised, so that the driver can read it whatever the exception was."""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Callable
from types import TracebackType

import cloudpickle

from podium.errors import Origin, PodiumError, WorkerError
from podium.single_controller.rank.context import RankContext

MESSAGE_CHARS = 8_000
"""A message longer than a few screens is data that was printed; a thousand ranks may send theirs at the same time."""
TRACEBACK_CHARS = 32_000
"""Some 200 frames: the outermost, where the user's code begins, and the innermost with the message, are both kept."""
REPORT = "_podium_report"
"""The attribute of an exception that holds the WorkerError made of it."""

_HOSTS = ("podium.single_controller.runtime.", "podium.single_controller.rank.", "ray.")  # modules that call the user's code


def worker_error(context: RankContext, method: str, error: BaseException) -> WorkerError:
    """The picklable description of what a rank raised; its traceback begins in the user's code."""
    cause = traceback.TracebackException(type(error), error, _skip_hosts(error.__traceback__))
    return WorkerError(
        Origin(context.group, method, context.rank, platform.node(), os.getpid()),
        cause_type=type(error).__name__,
        cause_message=_printable(shortened(message_of(error), MESSAGE_CHARS)),
        remote_traceback=_printable(shortened("".join(cause.format()), TRACEBACK_CHARS)),
    )


def with_report(context: RankContext, method: str, error: BaseException) -> Exception:
    """The error itself with our report as an attribute; only the report where the error cannot be sent to the driver."""
    report = worker_error(context, method, error)
    if not isinstance(error, Exception) or isinstance(error, StopIteration | WorkerError):
        return report  # a StopIteration cannot leave a coroutine; and another group's WorkerError must not be taken for ours
    try:
        setattr(error, REPORT, report)
        str(error).encode()
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # a foreign exception may raise anything when it is printed or pickled
        return report
    return error


def report_of(origin: Origin, error: BaseException, remote_traceback: str) -> WorkerError:
    """The report that a rank's error carries; a new one, of a rank at `origin`, where it carries none."""
    if isinstance(error, WorkerError):
        return error
    report = getattr(error, REPORT, None)
    if isinstance(report, WorkerError):
        report.__cause__ = error
        return report
    return WorkerError(origin, cause_type=type(error).__name__, cause_message=str(error), remote_traceback=remote_traceback)


def setup_failure(setup: Callable[[], object]) -> str | None:
    """Why a node is not ready: what `setup` raised. None where it did not."""
    try:
        setup()
    except PodiumError as error:
        return str(error)
    except Exception as error:  # of the user's function: the driver gets the message, and the node's log the traceback
        traceback.print_exc()
        return f"{type(error).__name__}: {message_of(error)}"
    return None


def shortened(text: str, most: int) -> str:
    r"""The text, or of one longer than `most` characters its head and its tail, and between them how much was left out.

    >>> shortened("0123456789", 4)
    '01\n... [6 characters left out] ...\n89'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half:,} characters left out] ...\n{text[-half:]}"


def message_of(error: BaseException) -> str:
    """`str(error)`, whatever that raises."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be shown: {type(second).__name__})"


def _printable(text: str) -> str:
    """The text as UTF-8 can hold it: file names that are not UTF-8 have halves of characters in them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _skip_hosts(trace: TracebackType | None) -> TracebackType | None:
    first = trace
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_HOSTS):
        trace = trace.tb_next
    return trace or first
