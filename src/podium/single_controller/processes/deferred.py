"""Deferred calls: they wait for the futures among their arguments, and are sent in the order in which they were made."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from podium.errors import GroupClosedError
from podium.single_controller.processes.pending_call import PendingCall


class DeferredCall:
    """A call that waits for its arguments; once it is sent, it is that call."""

    def __init__(self, method: str, resolve: Callable[[], None], send: Callable[[], PendingCall]) -> None:
        """`resolve` waits for the arguments, `send` sends the call then."""
        self.method = method
        self._resolve = resolve
        self._send = send
        self._sent: Future[PendingCall] = Future()

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The ranks that were sent the call and have not answered it."""
        return self._sent.result().silent_ranks if self._was_sent() else ()

    @property
    def has_failed(self) -> bool:
        """Whether an argument, the sending or a rank is known to have failed."""
        return self._sent.done() and (not self._was_sent() or self._sent.result().has_failed)

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Whether `finish` would return or raise without waiting for a rank's work; waits for it up to `wait_s`."""
        give_up = time.monotonic() + wait_s
        try:
            pending = self._sent.result(timeout=max(0.0, wait_s))
        except TimeoutError:  # of this wait, or of an argument: then `finish` raises it
            return self._sent.done()
        except Exception:
            return True
        return pending.is_over(max(0.0, give_up - time.monotonic()))

    def finish(self) -> dict[int, Any]:
        """Every rank's answer; raises the error of an argument, of the sending or of the call."""
        return self._sent.result().finish()

    def send(self) -> None:
        """Send the call, unless it was dropped while it waited for its arguments."""
        try:
            self._resolve()
            sent = None if self._sent.done() else self._send()
        except BaseException as error:  # raised by `finish`
            self._end(error)
        else:
            if sent is not None:
                with suppress(InvalidStateError):  # dropped meanwhile
                    self._sent.set_result(sent)

    def drop(self, reason: str) -> None:
        """Do not send it."""
        self._end(
            GroupClosedError(
                f"method {self.method!r} was not sent: its group was {reason} while the call waited for its arguments"
            )
        )

    def _end(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self._sent.set_exception(error)

    def _was_sent(self) -> bool:
        return self._sent.done() and self._sent.exception() is None


class DeferredCalls:
    """The deferred calls of a group. Their thread runs while there are any, and does not delay the interpreter's exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[DeferredCall] = deque()
        """The first one is being resolved or sent."""
        self._sender: threading.Thread | None = None

    @property
    def is_sender(self) -> bool:
        """Whether this thread is the one that sends deferred calls."""
        return threading.current_thread() is self._sender

    @property
    def is_busy(self) -> bool:
        """Whether calls wait, and this thread is not the one that sends them."""
        return self._sender is not None and not self.is_sender

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of the calls that wait."""
        with self._lock:
            return tuple(call.method for call in self._waiting)

    def post(self, call: DeferredCall) -> DeferredCall:
        """Send the call after those before it. RuntimeError, and nothing is posted, if the system cannot start a thread."""
        with self._lock:
            self._waiting.append(call)
            if self._sender is None:
                self._begin_to_send()
        return call

    def _begin_to_send(self) -> None:
        self._sender = threading.Thread(target=self._send_all, name="podium-deferred-calls", daemon=True)
        try:
            self._sender.start()
        except RuntimeError:
            self._sender = None
            self._waiting.pop()
            raise

    def drain(self) -> None:
        """Wait until all calls are sent."""
        sender = self._sender
        if sender is not None and sender is not threading.current_thread():
            sender.join()

    def drop_all(self, reason: str) -> None:
        """Drop all calls; `reason` says how the group ended."""
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for call in dropped:
            call.drop(reason)

    def _send_all(self) -> None:
        while (call := self._first()) is not None:
            call.send()
            with self._lock:
                if self._waiting and self._waiting[0] is call:
                    self._waiting.popleft()

    def _first(self) -> DeferredCall | None:
        with self._lock:
            if not self._waiting:
                self._sender = None
            return self._waiting[0] if self._waiting else None
