"""The rows of a batch: which still wait for a score, which failed and are tried again, and when scoring stops."""

from __future__ import annotations

from collections import deque

from podium.tasks.outcomes import Failed, Outcome


class Attempts:
    """The rows of a batch, from waiting to their outcome. A row that fails waits again until its tries are used up.

    With `stops_at_failure` the first row that failed for good ends the batch: nothing waits any more, and the rows without an
    outcome stay without. A row is then tried again at once, so that it is known soon; otherwise after those that wait, since what
    fails by chance passes.
    """

    def __init__(self, num_rows: int, *, max_retries: int = 0, stops_at_failure: bool = False) -> None:
        self.outcomes: list[Outcome | None] = [None] * num_rows
        """The final outcome of each row that has one."""
        self.num_retries = 0
        """Scores that were tried again."""
        self.is_stopped = False
        self._waiting = deque(range(num_rows))
        self._left = [max_retries] * num_rows
        self._stops_at_failure = stops_at_failure

    @property
    def is_waiting(self) -> bool:
        """Whether there is a row to take."""
        return bool(self._waiting)

    @property
    def failed(self) -> dict[int, Failed]:
        """The rows that failed for good."""
        return {row: outcome for row, outcome in enumerate(self.outcomes) if isinstance(outcome, Failed)}

    def take(self) -> int:
        """The next row to score; the caller settles it or gives it back."""
        return self._waiting.popleft()

    def give_back(self, row: int) -> None:
        """A row whose scoring did not begin."""
        self._waiting.appendleft(row)

    def settle(self, row: int, outcome: Outcome) -> None:
        """Record the outcome of a try."""
        if isinstance(outcome, Failed) and self._left[row] and not self.is_stopped:
            self._left[row] -= 1
            self.num_retries += 1
            (self._waiting.appendleft if self._stops_at_failure else self._waiting.append)(row)
            return
        self.outcomes[row] = outcome
        if isinstance(outcome, Failed) and self._stops_at_failure:
            self._waiting.clear()
            self.is_stopped = True
