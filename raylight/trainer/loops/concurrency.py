"""Number of rollouts that may run at a time, adapted to the engines' loads. Pure.

Additive increase, multiplicative decrease: the limit grows by steps while the engines have room and the limit
is what keeps rollouts back, and falls by a share as soon as an engine is overloaded. The most loaded engine
decides, because the calls of a rollout stay on one replica. Running rollouts are never cancelled: a lower
limit takes effect as they end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raylight.engines.protocol import EngineLoad

Signal = Literal["room", "steady", "high", "queue", "preempted"]

ROOM, HIGH, TARGET = 0.6, 0.8, 0.7
"""Use of the key-value cache below which the limit may grow, above which it falls, and to which it falls."""
GROWTH = 1.25
"""Factor of a step of growth below the limit that overloaded an engine last. ROOM * GROWTH stays below HIGH,
so that growth alone leads to no cut."""
STEP = 0.02
"""Share of that limit that a step of growth adds near or above it."""
NEAR = 0.9
"""Share of that limit from which growth is by `STEP`."""
BINDING = 0.9
"""Share of the limit that must be in flight for it to grow: otherwise something else keeps rollouts back."""
QUEUE = 0.5
"""Waiting requests, as a share of the running ones, that are a queue."""
QUEUE_S = 6.0
"""Time for which a queue must last: a group's first calls arrive together."""
FRESH_S = 15.0
"""Time after which a replica that no longer reports its load does not count any more."""

CALM: frozenset[Signal] = frozenset({"room", "steady"})
"""Signals after which the limit does not fall."""
CUTS: dict[Signal, tuple[float, float]] = {"preempted": (0.8, 0.5), "queue": (0.9, 0.5)}
"""Factor of a cut, and of one that repeats."""


@dataclass
class _Replica:
    """State of a replica's load."""

    load: EngineLoad
    seen: float
    preempted: bool = False
    """True if a request was preempted between the last two loads."""
    queue_since: float | None = None

    def update(self, load: EngineLoad, now: float) -> None:
        self.preempted = load.preemptions > self.load.preemptions
        has_queue = load.waiting > QUEUE * load.running and not load.paused
        if not has_queue:
            self.queue_since = None
        elif self.queue_since is None:
            self.queue_since = now
        self.load, self.seen = load, now


class Concurrency:
    """Limit of the rollouts, or of the groups, in flight.

    | worst load of a replica                                     | limit                                   |
    |-------------------------------------------------------------|-----------------------------------------|
    | a request was preempted                                     | x 0.8; x 0.5 if it repeats              |
    | half as many waiting as running, for 6 s                    | x 0.9; x 0.5 if it repeats              |
    | more than 0.8 of the cache in use                           | x 0.7 / use                             |
    | less than 0.6 in use, nothing waits, and the limit binds    | x 1.25; + 2% near the last overload     |
    | anything else, a paused engine, or no load of a replica     | as it is                                |

    The limit grows once in a turnover: the time in which as many rollouts have ended as it allows. A cut is
    relative to what was in flight. The next cut waits until no more than the limit is in flight, because
    until then the old load is reported. It repeats if less than a turnover has passed since the last one.

    Args:
        ceiling: number that is admitted at most.
        start: limit at first; None: the ceiling.

    Attributes:
        limit: current limit.
        signal: worst load of the last observation.
    """

    def __init__(self, ceiling: int, start: int | None = None) -> None:
        if ceiling < 1 or (start is not None and start < 1):
            raise ValueError(f"the ceiling and the start must be positive, not {ceiling} and {start}")
        self._ceiling = ceiling
        self.limit = min(start or ceiling, ceiling)
        self.signal: Signal = "steady"
        self._replicas: dict[str, _Replica] = {}
        self._draining = False
        """True after a cut, until no more than the limit is in flight."""
        self._repeats = False
        """True from a cut until a turnover without one."""
        self._overload: int | None = None
        """Limit that overloaded an engine last."""
        self._turnover_at: int | None = None
        """Number of ended rollouts from which the limit may grow again."""
        self._in_flight = 0
        """Number in flight at the last observation."""

    @property
    def ceiling(self) -> int:
        """Number that is admitted at most. A limit at the ceiling follows it."""
        return self._ceiling

    @ceiling.setter
    def ceiling(self, ceiling: int) -> None:
        self.limit = ceiling if self.limit == self._ceiling else min(self.limit, ceiling)
        self._ceiling = ceiling

    def observe(self, loads: Mapping[str, EngineLoad], in_flight: int, ended: int, now: float) -> int:
        """Take the replicas' loads; return the limit.

        Args:
            loads: loads measured since the last call, by replica. Empty: the limit stays as it is.
            in_flight: number of rollouts in flight.
            ended: number of rollouts that have ended since the start.
            now: time in seconds.
        """
        if self._turnover_at is None:
            self._turnover_at = ended + self.limit
        self._take(loads, now)
        self.signal = self._worst(loads, now)
        self._draining = self._draining and in_flight > self.limit
        has_turned = ended >= self._turnover_at
        if self.signal in CALM:
            self._repeats = self._repeats and not has_turned
            if self.signal == "room" and has_turned and in_flight >= BINDING * self.limit:
                self._set(self._grown(), ended)
        elif not self._draining:
            self._cut(min(max(in_flight, self._in_flight), self.limit), ended)
            self._draining = in_flight > self.limit
        self._in_flight = in_flight
        return self.limit

    def _take(self, loads: Mapping[str, EngineLoad], now: float) -> None:
        """Update the replicas, and forget those that have not reported for `FRESH_S`."""
        for name, load in loads.items():
            self._replicas.setdefault(name, _Replica(load, now)).update(load, now)
        self._replicas = {name: r for name, r in self._replicas.items() if now - r.seen <= FRESH_S}

    def _worst(self, loads: Mapping[str, EngineLoad], now: float) -> Signal:
        replicas = [self._replicas[name] for name in loads if not loads[name].paused]
        if any(r.preempted for r in replicas):
            return "preempted"
        if any(r.queue_since is not None and now - r.queue_since >= QUEUE_S for r in replicas):
            return "queue"
        if any(r.load.kv_use > HIGH for r in replicas):
            return "high"
        complete = bool(replicas) and len(replicas) == len(self._replicas)
        has_room = all(r.load.kv_use < ROOM and not r.load.waiting for r in replicas)
        return "room" if complete and has_room else "steady"

    def _grown(self) -> int:
        """Return the limit after a step of growth, which leaves the caches' use below `HIGH`."""
        use = max(r.load.kv_use for r in self._replicas.values())
        fast = max(self.limit + 1, round(GROWTH * self.limit))
        if use * (self.limit + 1) > HIGH * self.limit:
            return self.limit
        if self._overload is None or self.limit > GROWTH * self._overload:
            self._overload = None  # what overloaded an engine once no longer does
            return fast
        step = max(1, round(STEP * self._overload))
        return max(self.limit + step, min(fast, round(NEAR * self._overload)))

    def _cut(self, running: int, ended: int) -> None:
        """Lower the limit below the number that overloaded an engine."""
        if self.signal == "high":
            factor = TARGET / max(r.load.kv_use for r in self._replicas.values())
        else:
            factor = CUTS[self.signal][self._repeats]
            self._overload, self._repeats = max(running, 1), True
        for replica in self._replicas.values():
            replica.queue_since = None
        self._set(int(factor * running), ended)

    def _set(self, limit: int, ended: int) -> None:
        """Set the limit: a rollout for each replica, and at most the ceiling."""
        self.limit = min(max(limit, len(self._replicas), 1), self._ceiling)
        self._turnover_at = ended + self.limit
