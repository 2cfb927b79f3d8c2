"""Wall-clock time (display only) and lived time (for deadlines) of a run.

Laws:
- Lived time goes on only while a store of the run is open. Time in which a run is dead, or starts again,
  counts for no attempt and no session.
- A machine's clock that is set forward or back moves no deadline.

| instant | measured in |
|---|---|
| lease, silence, timeout and `max_seconds` of an attempt, expiry of a session | lived time |
| delay of a rollout before it is tried again | lived time |
| begin of an outage of serving, end of the attempts that it may have spoilt | lived time |
| places of a group of sessions, silence of external runners | monotonic time of the waiting process |
| end of a drained node | time of the day: Ray announces it so |
| expiry of a Tinker checkpoint | time of the day: the Tinker API returns it so |
| times in spans, calls, metrics and pages | time of the day, to show; the order of calls on one clock |

A clock that is set back while an attempt runs changes the order of its calls, which may then train as more
rows.

Curricula, early stops, staleness and retries count evaluations, steps, versions and attempts. API keys do not
expire.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from raylight.store.tables.journal import Journal

SECONDS_LIVED, SAVED_AT = "seconds_lived", "seconds_lived_saved_at"
"""Counters: the seconds lived, and the monotonic time at which they were stored. A store that is killed
repeats the time since its last transaction."""


class RunClock:
    """Time of a run whose journal is open.

    Args:
        clock: seconds since the epoch.
        monotonic: seconds since any moment; nobody sets it.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._clock, self._monotonic = journal, clock, monotonic
        self._lived: float = journal.counter(SECONDS_LIVED)
        self._before: tuple[float, float] = journal.counter(SAVED_AT), self._lived
        """Monotonic time of the last transaction before, and the seconds lived then."""
        self._running_since: float | None = monotonic()
        self.resumed_at = 0.0
        """Lived time before which nothing ended in this process."""

    def __call__(self) -> float:
        """Return the time of the day, in seconds since the epoch."""
        return self._clock()

    def lived(self) -> float:
        """Return the seconds that the run has lived."""
        return self._lived + (0.0 if self._running_since is None else self._monotonic() - self._running_since)

    def lived_at(self, instant: float) -> float:
        """Return the seconds that the run had lived at a monotonic time of this machine.

        It is exact even for a time before this store was opened, if the store before it was killed: what
        ended before an outage must not look as if it had ended in it.
        """
        if self._running_since is not None and instant >= self._running_since:
            return self._lived + instant - self._running_since
        saved_at, lived = self._before
        if instant <= saved_at or not saved_at:  # or nothing was stored before
            return min(lived - (saved_at - instant), self._lived)
        return math.nextafter(self._lived, math.inf)  # after all that was stored, and before what is to come

    @property
    def is_stopped(self) -> bool:
        """True while lived time stands still."""
        return self._running_since is None

    def stop(self) -> None:
        """Let lived time stand still."""
        self._lived, self._running_since = self.lived(), None
        self.resumed_at = self._lived

    def go_on(self) -> None:
        """Let lived time go on."""
        if self._running_since is None:
            self._running_since = self._monotonic()

    def save(self) -> None:
        """Within a transaction: store the seconds lived."""
        now = {SECONDS_LIVED: self.lived(), SAVED_AT: self._monotonic()}
        for name, value in now.items():
            self._journal.increment(name, by=value - self._journal.counter(name))
