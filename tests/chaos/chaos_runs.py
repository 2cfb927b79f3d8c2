"""The runs under fault: each takes a series of faults, the next one when it has recovered from the last."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from chaos_faults import Fault


@dataclass(frozen=True)
class ChaosRun:
    """A run, and the faults that it must survive.

    Attributes:
        name: name on the command line, unique.
        settings: arguments of `chaos_driver.main`.
        seed: seed of random moments, and of the order of faults at random moments.
    """

    name: str
    faults: tuple[Fault, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    seed: str = "0"

    def alone(self) -> Iterator[ChaosRun]:
        """Yield a run for each fault."""
        for fault in self.faults:
            yield replace(self, name=f"{self.name}:{fault.name}", faults=(fault,))

    def with_seed(self, seed: str) -> ChaosRun:
        """Return a run with other random moments."""
        faults = list(self.faults)
        if all(fault.when == "random" for fault in faults):
            random.Random(seed).shuffle(faults)
        return replace(self, faults=tuple(faults), seed=seed)

    @property
    def breaks_disk(self) -> bool:
        """True if the disk of the run directory fails."""
        return any(fault.action == "break the disk" for fault in self.faults)

    @property
    def steps(self) -> int:
        """Number of steps, enough for all faults and the recovery from them."""
        return 4 + 3 * len(self.faults)

    @property
    def expected_ends(self) -> list[str]:
        """Name of the error that ends each driver; "" if it ends as by a signal."""
        return [*(fault.error for fault in self.faults if fault.error is not None), "completed"]

    @property
    def may_fail(self) -> int:
        """Number of rollouts that the faults themselves may fail."""
        return sum(fault.may_fail for fault in self.faults)


def _kill(target: str, *moments: str, **fields: Any) -> list[Fault]:
    return [Fault(target, when, **fields) for when in moments]


def _freeze(target: str, when: str, seconds: float | None = None) -> Fault:
    return Fault(target, when, "freeze", seconds=seconds)


LOST = "ClusterLostError"
DAY_S = 86_400
SERIES: dict[str, list[Fault]] = {
    # the ingress; a process that is frozen for ever comes last
    "haproxy": [
        *_kill("HAProxy", "start", "rollouts", "sync", "evaluation"),
        _freeze("HAProxy", "rollouts", 20.0),
        _freeze("HAProxy", "rollouts"),
    ],
    "manager": [
        *_kill("proxy manager", "start", "rollouts", "rollouts"),
        _freeze("proxy manager", "rollouts"),
    ],
    "controller": [
        *_kill("Serve controller", "start", "rollouts"),
        _freeze("Serve controller", "rollouts", 20.0),
        _freeze("Serve controller", "rollouts"),
    ],
    # the engine
    "replica": [
        *_kill("replica", "start", "rollouts", "sync", "evaluation"),
        _freeze("replica", "rollouts", 20.0),
        _freeze("replica", "sync"),
    ],
    "replicas": [
        *_kill("replica", "rollouts", "sync"),
        Fault("replica", "rollouts", every=True),
        _freeze("replica", "sync"),
    ],
    "coordinator": [
        *_kill("coordinator", "start", "rollouts", "sync", "sync"),
        _freeze("coordinator", "sync", 15.0),
        _freeze("coordinator", "sync"),
    ],
    # learners
    "learner": [*_kill("learner", "start", error="LearnerLostError"), *_kill("learner", "sync")],
    "learners": [*_kill("learner", "update", "update", "checkpoint"), _freeze("learner", "update")],
    # runners, the store, the agent
    "runner": [
        *_kill("runner", "start", "rollouts"),
        Fault("runner", "rollouts", every=True),
        _freeze("runner", "rollouts"),
    ],
    "store": [
        *_kill("store", "start", "rollouts"),
        _freeze("store", "rollouts", 20.0),
        _freeze("store", "rollouts"),
        *_kill("store", "shutdown"),
    ],
    "program": _kill("program", "rollouts", "rollouts", may_fail=1),
    # Ray, nodes, the disk
    "ray": [
        *_kill("GCS", "start", error=LOST),
        _freeze("GCS", "rollouts", 10.0),
        _freeze("raylet", "rollouts", 10.0),
        *_kill("GCS", "rollouts", error=LOST),
        *_kill("raylet", "rollouts", "sync", error=LOST),
        *_kill("dashboard agent", "rollouts", error=LOST),
    ],
    "node": [Fault("", "rollouts", "remove the node")],
    "node-and-replica": [Fault("replica", "rollouts", "replace the node")],
    "disk": [Fault("", "rollouts", "fill the disk", error="DiskError")],
    "broken-disk": [Fault("", "rollouts", "break the disk", error="DiskError")],
    # the wall clock: of a run that is away for a day, and of a live one. Ray's own timers stand still for as
    # long as its clock was set back: what a killed driver leaves ends that much later, and a live run comes
    # last
    "clock": [
        Fault("driver", "rollouts", clock_s=DAY_S, error=""),
        Fault("driver", "rollouts", clock_s=-20, error=""),
        Fault("", "rollouts", "set the clock", clock_s=DAY_S),
        Fault("", "rollouts", "set the clock", clock_s=-900),
    ],
    # the driver
    "driver": [
        *_kill("driver", "start", "rollouts", error=""),
        _freeze("driver", "sync", 20.0),
        *_kill("driver", "sync", "checkpoint", "shutdown", error=""),
    ],
    "signals": [
        Fault("driver", "start", "interrupt", error=""),
        *(Fault("driver", "rollouts", "interrupt", signals=n, error="") for n in (1, 2, 3)),
        Fault("driver", "rollouts", "terminate", error=""),
    ],
    # any part, at random moments
    "random": [
        *(Fault(t, "random") for t in ("HAProxy", "replica", "coordinator", "learner", "runner", "store")),
        Fault("driver", "random", error=""),
    ],
    # several parts in a run of CI, and full buffers
    "parts": [
        *_kill("HAProxy", "rollouts"),
        *_kill("replica", "rollouts"),
        *_kill("store", "rollouts"),
        *_kill("coordinator", "sync"),
    ],
    "buffer": _kill("driver", "full buffer", error=""),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "learners": {"learners": 2},
    "program": {"program": True},
    "node": {"replicas": 2},
    "node-and-replica": {"learner_node": True},
    "buffer": {"holds": True},
}
STALENESS: dict[str, dict[str, Any]] = {
    "": {},
    "wait-": {"max_staleness": 2},
    "mask-": {"max_staleness": 2, "stale": "mask"},
    "drop-": {"max_staleness": 2, "stale": "drop"},
}


SYNCHRONOUS = ("program", "parts")
"""Series of parts that work alike in all runs."""
ASYNCHRONOUS = (
    "replicas",
    "ray",
    "node",
    "node-and-replica",
    "disk",
    "broken-disk",
    "clock",
    "signals",
    "buffer",
)
"""Series in which an asynchronous run covers everything that a synchronous one does."""


def _runs(prefix: str, names: Iterable[str]) -> Iterator[ChaosRun]:
    """Yield the runs of some series. A start is the same in all runs: it belongs to one of them."""
    for name in names:
        has_start = not prefix or name in ASYNCHRONOUS
        faults = tuple(fault for fault in SERIES[name] if has_start or fault.when != "start")
        yield ChaosRun(f"{prefix}{name}", faults, SETTINGS.get(name, {}) | STALENESS[prefix])


RUNS = {
    run.name: run
    for run in (
        *_runs("", [name for name in SERIES if name not in ASYNCHRONOUS]),
        *_runs("wait-", [name for name in SERIES if name not in SYNCHRONOUS]),
        *_runs("mask-", ["random", "buffer"]),
        *_runs("drop-", ["random", "buffer"]),
    )
}
"""All runs: synchronous ones, and, with the prefixes wait-, mask- and drop-, asynchronous ones with this
`stale` and a `max_staleness` of 2."""
CI = (("parts", "wait-buffer"), ("learner", "wait-disk"), ("runner", "store"))
"""Pairs of runs; CI takes one in turn. Each pair takes two to four minutes on two quiet cores."""
