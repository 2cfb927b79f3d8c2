"""Monitor of a served model: probes it through the ingress, as agents reach it, and reports outages to the
store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httpx2

from raylight._utils.aio import cancel_all, pause
from raylight.errors import ServingLostError
from raylight.semconv import REPLICA_HEADER
from raylight.store.client import StoreClient

PROBE_INTERVAL_S = 1.0
RECHECK_S = 0.25
"""Time from a failed probe to the next one."""
PROBE_TIMEOUT_S = 5.0
"""Time after which a probe is late."""
INGRESS_TIMEOUT_S = 2.0
"""Further time in which the ingress itself must answer, or it is late too."""

REPLICA_CHECK_S = 1.0
"""Interval at which live replicas are counted while a probe has no answer."""

CountReplicas = Callable[[], int | None]
"""Function that returns the number of live replicas; None if it is unknown."""
REFUSED_PROBES = 2
"""Probes in a row without a connection, or with an answer of the ingress alone, that show an outage."""
LATE_PROBES = 3
"""Failed probes in a row that show an outage if the ingress was only late."""

ProbeResult = Literal["answered", "busy", "refused", "late"]
"""`answered`: by a replica. `busy`: the ingress answers, and replicas are alive, but none answered in time.
`refused`: no connection, or the ingress reaches no replica. `late`: nothing answered in time."""


class IngressProbe:
    """Sends probes to a model's `/health` through the ingress.

    Args:
        url: base URL of the model, without `/v1`.
        count_replicas: distinguishes busy replicas from missing ones: without any replica, Serve's fallback
            proxy holds requests back.
    """

    def __init__(
        self,
        url: str,
        count_replicas: CountReplicas = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = f"{url}/health"
        self._ingress_url = httpx2.URL(url).join("/-/healthz")
        self._count_replicas = count_replicas
        self._clock = clock
        self._client = httpx2.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False)

    async def send(self) -> Probe:
        sent, request = self._clock(), asyncio.ensure_future(self._client.get(self._url))
        try:
            while not (await asyncio.wait([request], timeout=REPLICA_CHECK_S))[0]:
                if self._count_replicas() == 0:
                    return Probe(sent, "refused", "no replica is alive")
            response = request.result()
        except httpx2.TimeoutException:
            return await self._explain_delay(sent)
        except httpx2.HTTPError as error:
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            return Probe(sent, "refused", f"{self._url} cannot be reached ({cause})")
        finally:
            await cancel_all([request])
        if REPLICA_HEADER in response.headers:
            return Probe(sent, "answered")
        return Probe(
            sent,
            "refused",
            f"the ingress answers {self._url} with status {response.status_code} and reaches no replica",
        )

    async def _explain_delay(self, sent: float) -> Probe:
        """Return the result of a probe that no replica answered in time."""
        late = f"{self._url} did not answer within {PROBE_TIMEOUT_S:g} s"
        try:
            await self._client.get(self._ingress_url, timeout=INGRESS_TIMEOUT_S)
        except httpx2.HTTPError:
            return Probe(sent, "late", f"{late}, and neither did the ingress")
        return Probe(sent, "busy", late)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class ServingMonitor:
    """Probes a model until it is closed, and ends the run if the model stays away too long.

    Args:
        name: name of the served application.
        store: leases nothing while the model is reported as away.
        timeout_s: longest outage that the run waits for.
        show: shows the begin and the end of an outage.
    """

    def __init__(
        self,
        name: str,
        probe: IngressProbe,
        store: StoreClient,
        timeout_s: float,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._probe = probe
        self._store = store
        self._timeout_s = timeout_s
        self._show = show
        self._clock = clock
        self._health = ServingHealth(clock())
        self._reported: Outage | None = None
        """Outage whose end has not been reported to the store."""
        self._checking = asyncio.Lock()

    @property
    def outages(self) -> int:
        """Number of outages so far."""
        return self._health.outages

    @property
    def seconds_away(self) -> float:
        """Total length of all outages, in seconds."""
        return self._health.seconds_away(self._clock())

    async def run(self) -> None:
        """Probe the model until cancelled.

        Raises:
            ServingLostError: the model was away for `timeout_s`.
        """
        while True:
            await self._check()
            outage = self._health.outage
            if outage is not None and self._clock() - outage.since > self._timeout_s:
                raise ServingLostError(
                    f"the model of {self._name} has been away since {self._time_of_day(outage.since)}, for "
                    f"longer than {self._timeout_s:g} s (engine.start_timeout_s): {outage.reason}. See "
                    "`serve status` and the logs of its replicas and of the Serve proxy on Ray's dashboard. "
                    "Rollouts that the outage interrupted are not lost: a training run goes on with "
                    "resume='auto'"
                )
            await self._pause()

    async def confirm(self) -> None:
        """Wait until the model is in reach now, so that what rollouts returned so far is known to be sound.

        If an outage is found, it has been reported to the store, and `outages` has grown.
        """
        while await self._check() not in ("answered", "busy") or self._health.outage is not None:
            await self._pause()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._probe.aclose()

    async def _check(self) -> str:
        """Send a probe, and report what changed; returns the probe's result."""
        async with self._checking:
            return await self._check_alone()

    async def _check_alone(self) -> str:
        before = self._health.outage
        probe = await self._probe.send()
        self._health.observe(probe)
        outage = self._health.outage
        reported = outage or self._reported
        if reported is not None:  # repeated, because a restarted store forgets it
            self._reported = reported
            await self._store.report_outage(self._name, reported.since, reported.reason)
        if outage is None and reported is not None:
            await self._store.report_outage(self._name, None)
            self._reported = None
        if outage is not None and before is None:
            self._show(
                f"serving is away since {self._time_of_day(outage.since)}: {outage.reason}. Rollouts wait "
                f"until it is back, for up to {self._timeout_s:g} s (engine.start_timeout_s)"
            )
        elif outage is None and before is not None:
            self._show(f"serving is back after {probe.sent - before.since:.0f} s; rollouts go on")
        return probe.result

    async def _pause(self) -> None:
        await pause(RECHECK_S if self._health.is_in_doubt else PROBE_INTERVAL_S)

    def _time_of_day(self, moment: float) -> str:
        return time.strftime("%H:%M:%S", time.localtime(time.time() - (self._clock() - moment)))


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
    """State machine of a model's availability, as probes through the ingress show it.

    Laws:
    - An answer with the mark of a replica shows that the model can be reached.
    - Refused probes show an outage; a single one does not, because the ingress may be reloading.
    - A late probe shows an outage only if the ingress was late several times: a busy machine answers late.
    - An outage begins at the last probe that was answered, because it is unknown when the ingress went away.

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
