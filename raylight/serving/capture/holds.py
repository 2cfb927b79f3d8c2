"""Holds: calls of an attempt may be answered before the store has them.

A hold is a call that is announced to the store like any other, samples nothing, and stays open: while it is
open, its attempt cannot succeed. So the calls that follow need not be announced before they are answered. If
this process dies, the store keeps the hold, and the attempt is retried, because calls may be missing.

Laws: a hold covers calls only after the store has it, and no longer once its release is on its way. Its
release follows all calls that it covered. One that covered a call which the store cannot have is never
released.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache

from raylight.store.transitions import HOLD
from raylight.types import CallKey

HOLD_S = 0.01
"""Time without a new call and an end of one after which an attempt is released. An attempt that ends waits
for it."""
QUICK_S = 0.02
"""Longest time between two calls of an attempt that follow each other quickly."""
QUICK_CALLS = 2
"""Number of such calls after which an attempt is held. The second one shows that the agent makes several:
further ones save the wait for an announcement, for one wait for the release at the end."""
REMEMBERED = 1_000
"""Attempts whose quick calls are counted."""


@dataclass(eq=False, slots=True)
class Hold:
    """A hold of one attempt."""

    key: CallKey
    used: float
    """Time of the last call that began or ended."""
    is_stored: bool = False
    is_broken: bool = False
    """True if the store cannot have a call that it covered."""


class Holds:
    """The attempts that are held, at most one hold each.

    Args:
        hold_s: see `HOLD_S`; 0 holds no attempt.
        clock: monotonic time in seconds.
    """

    def __init__(self, hold_s: float, clock: Callable[[], float]) -> None:
        self.hold_s = hold_s
        self._clock = clock
        self._holds: OrderedDict[str, Hold] = OrderedDict()
        """Holds by attempt; the one used last is at the end."""
        self._streaks: LRUCache[str, tuple[int, float]] = LRUCache(REMEMBERED)
        """Number of quick calls, and time of the last one, by attempt that is not held."""

    def request(self, key: CallKey) -> Hold | None:
        """Return a new hold of a call's attempt, to announce with the call; None if it has one, or calls too
        seldom."""
        count, last = self._streaks.get(key.attempt_id, (0, 0.0))
        count = count + 1 if self._clock() - last < QUICK_S else 1
        self._streaks[key.attempt_id] = count, self._clock()
        if not self.hold_s or count < QUICK_CALLS or key.attempt_id in self._holds:
            return None
        hold_key = CallKey(key.rollout_id, key.attempt_id, f"{HOLD}{secrets.token_hex(14)}")
        hold = self._holds[key.attempt_id] = Hold(hold_key, self._clock())
        return hold

    def use(self, attempt_id: str) -> Hold | None:
        """Return the hold that covers an attempt's calls, which stays for a while longer; None if none
        does."""
        hold = self._holds.get(attempt_id)
        if hold is None:
            if (streak := self._streaks.get(attempt_id)) is not None:
                self._streaks[attempt_id] = streak[0], self._clock()
            return None
        hold.used = self._clock()
        self._holds.move_to_end(attempt_id)
        return hold if hold.is_stored else None

    def drop(self, hold: Hold) -> None:
        """Cover no further calls. The hold of a call that was rejected or lost stays in the store."""
        hold.is_broken = True
        if self._holds.get(hold.key.attempt_id) is hold:
            del self._holds[hold.key.attempt_id]

    def release(self, everything: bool = False) -> list[Hold]:
        """Return the holds to release now, which cover no further calls.

        Args:
            everything: True releases those in use too.
        """
        until = self._clock() - self.hold_s
        released = []
        for attempt_id, hold in list(self._holds.items()):
            if not everything and hold.used > until:
                break
            if hold.is_stored:
                del self._holds[attempt_id]
                self._streaks[attempt_id] = QUICK_CALLS, hold.used
                released.append(hold)
        return released

    @property
    def next_release(self) -> float | None:
        """Time at which the next hold may be released; None if the store has no hold."""
        return next((hold.used + self.hold_s for hold in self._holds.values() if hold.is_stored), None)
