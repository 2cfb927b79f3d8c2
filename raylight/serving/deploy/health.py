"""Health of a served model, as probes through the ingress show it. Pure: the caller has the clock.

Laws:
- An answer with the mark of a replica shows that the model can be reached.
- Refused probes show an outage; a single one does not, because the ingress may be reloading.
- A late probe shows an outage only if the ingress itself was late several times: a busy machine answers late.
- An outage begins at the last probe that was answered, because it is unknown when the ingress went away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

REFUSED_PROBES = 2
"""Probes in a row without a connection, or with an answer of the ingress alone, that show an outage."""
LATE_PROBES = 3
"""Failed probes in a row that show an outage if the ingress was only late."""

ProbeResult = Literal["answered", "busy", "refused", "late"]
"""`answered`: by a replica. `busy`: the ingress answers, and replicas are alive, but none answered in time.
`refused`: no connection, or the ingress reaches no replica. `late`: nothing answered in time."""


@dataclass(frozen=True)
class Probe:
    """A request for the model's health.

    Attributes:
        sent: monotonic time in seconds.
        reason: cause of its failure.
    """

    sent: float
    result: ProbeResult
    reason: str = ""


@dataclass(frozen=True)
class Outage:
    """A time without any replica in reach.

    Attributes:
        since: last time at which the model was known to be in reach, as `Probe.sent`.
    """

    since: float
    reason: str


class ServingHealth:
    """State machine of a model's availability.

    Args:
        now: time at which the model is known to be in reach, as `Probe.sent`.
    """

    def __init__(self, now: float) -> None:
        self._reachable_at = now
        self._refused = self._failed = 0
        """Probes in a row that were refused, and that failed."""
        self._past_seconds = 0.0
        self.outage: Outage | None = None
        """The current outage."""
        self.outages = 0
        """Number of outages so far."""

    def observe(self, probe: Probe) -> None:
        """Take the result of the next probe into account."""
        if probe.result == "answered" or (probe.result == "busy" and self.outage is None):
            self._reachable_at, self._refused, self._failed = probe.sent, 0, 0
            if self.outage is not None:
                self._past_seconds += probe.sent - self.outage.since
                self.outage = None
            return
        self._failed += 1
        self._refused = self._refused + 1 if probe.result == "refused" else 0
        if self.outage is None and (self._refused >= REFUSED_PROBES or self._failed >= LATE_PROBES):
            self.outage = Outage(self._reachable_at, probe.reason)
            self.outages += 1

    @property
    def is_in_doubt(self) -> bool:
        """True if the last probe failed, so that the next one should follow at once."""
        return self.outage is None and self._failed > 0

    def seconds_away(self, now: float) -> float:
        """Return the total length of all outages, in seconds."""
        return self._past_seconds + (now - self.outage.since if self.outage is not None else 0.0)
