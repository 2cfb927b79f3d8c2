"""The faults: what is done to which process of a run, when, and what the run is expected to do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from chaos_events import Event, Predicate
from chaos_log import HELD_ROLLOUTS, TASKS

Action = Literal[
    "kill", "freeze", "interrupt", "terminate", "fill the disk", "remove the node", "replace the node"
]


def is_line(part: str) -> Predicate:
    """Match a printed line that contains `part`."""
    return lambda event: part in event.text


def is_step(number: int) -> Predicate:
    return lambda event: event.kind == "step" and event.fields["step"] >= number


def is_of_run(event: Event) -> bool:
    """Match an event of the agent or the driver, not of the test."""
    return event.kind not in ("line", "exit")


def is_full_buffer(event: Event) -> bool:
    """Match the group after which all groups wait to be trained, but for those with a held rollout."""
    waiting = len(HELD_ROLLOUTS)
    return event.kind == "group" and event.fields == {"finished": 2 * TASKS - waiting, "waiting": waiting}


def is_event(kind: str, mode: str | None = None) -> Predicate:
    return lambda event: event.kind == kind and mode in (None, event.fields.get("mode"))


MOMENTS: dict[str, list[Predicate]] = {
    "start": [is_line("starting the engine")],
    "rollouts": [is_event("finished", "train"), is_event("begun", "train")],
    "update": [is_event("update")],
    "sync": [is_event("sync")],
    "evaluation": [is_event("begun", "val")],
    "checkpoint": [is_event("checkpoint")],
    "full buffer": [is_event("held"), is_full_buffer],
    "shutdown": [is_line("stopping")],
}
"""Events for which a fault waits, one after another. A fault at a "random" moment waits for a number of any
events."""
RANDOM_EVENTS = 120
"""Largest number of events for which a fault at a random moment waits. A step has about eighty."""
FIRST_STEP = 2
"""Step after which a fault comes at the earliest; a training state is saved then."""


@dataclass(frozen=True)
class Fault:
    """A fault, and the expected reaction.

    Attributes:
        name: name on the command line, unique.
        action: with "replace the node" the node that has the learners, while the target is killed.
        target: kind of process, a key of `chaos_processes.TARGETS`.
        when: key of MOMENTS, or "random".
        times: number of times; the later ones come at the same moment of a later step.
        seconds: time after which a frozen process goes on; None: never.
        every: do it to all processes of the kind, not only to the first.
        error: name of the error that ends the driver; "" if it ends as by a signal. None: the run goes on. A
            run that ended is resumed with `resume="auto"`, and must then complete.
        may_fail: number of rollouts that the fault itself may fail.
        settings: arguments of `chaos_driver.main`.
    """

    name: str
    target: str
    when: str
    action: Action = "kill"
    times: int = 1
    seconds: float | None = None
    every: bool = False
    error: str | None = None
    may_fail: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    seed: str = "0"
    """Seed of random moments."""

    def prelude(self, repeated: bool) -> list[Predicate]:
        """Return the events after which the target is looked up, shortly before the moment."""
        if repeated:
            return [is_event("step")]
        return [] if self.when == "start" else [is_step(FIRST_STEP - 1)]

    @property
    def moment(self) -> list[Predicate]:
        """Events that the fault waits for after its prelude."""
        if self.when == "random":
            return [is_of_run] * random.Random(f"{self.seed} {self.name}").randint(1, RANDOM_EVENTS)
        events = MOMENTS[self.when]
        return events if self.when in ("start", "shutdown") else [is_event("step"), *events]

    @property
    def description(self) -> str:
        """The action in words."""
        how = self.action
        if self.action == "freeze":
            how += f" for {self.seconds:g} s" if self.seconds else " for good"
        times = {1: "", 2: ", twice", 3: ", three times"}[self.times]
        return f"{how}{times}"


def _fault(name: str, target: str, when: str, action: Action = "kill", **fields: Any) -> Fault:
    return Fault(name, target, when, action, **fields)


TWO_REPLICAS = {"replicas": 2}
TWO_RANKS = {"learners": 2}
LOST = "ClusterLostError"
SYNCHRONOUS = {
    fault.name: fault
    for fault in (
        # the ingress
        _fault("haproxy-rollouts", "HAProxy", "rollouts"),
        _fault("haproxy-twice", "HAProxy", "rollouts", times=2),
        _fault("haproxy-sync", "HAProxy", "sync"),
        _fault("haproxy-evaluation", "HAProxy", "evaluation"),
        _fault("haproxy-start", "HAProxy", "start"),
        _fault("haproxy-freeze", "HAProxy", "rollouts", "freeze", seconds=20.0),
        _fault("haproxy-frozen", "HAProxy", "rollouts", "freeze"),
        _fault("manager-rollouts", "proxy manager", "rollouts"),
        _fault("manager-twice", "proxy manager", "rollouts", times=2),
        _fault("manager-start", "proxy manager", "start"),
        _fault("manager-frozen", "proxy manager", "rollouts", "freeze"),
        _fault("controller-rollouts", "Serve controller", "rollouts"),
        _fault("controller-start", "Serve controller", "start"),
        _fault("controller-freeze", "Serve controller", "rollouts", "freeze", seconds=20.0),
        _fault("controller-frozen", "Serve controller", "rollouts", "freeze"),
        # the engine
        _fault("replica-rollouts", "replica", "rollouts"),
        _fault("replica-twice", "replica", "rollouts", times=2),
        _fault("replica-sync", "replica", "sync"),
        _fault("replica-start", "replica", "start"),
        _fault("replica-evaluation", "replica", "evaluation"),
        _fault("replica-freeze", "replica", "rollouts", "freeze", seconds=20.0),
        _fault("replica-frozen", "replica", "sync", "freeze"),
        _fault("replica-1-of-2", "replica", "rollouts", settings=TWO_REPLICAS),
        _fault("replica-1-of-2-sync", "replica", "sync", settings=TWO_REPLICAS),
        _fault("replica-1-of-2-frozen", "replica", "sync", "freeze", settings=TWO_REPLICAS),
        _fault("replica-2-of-2", "replica", "rollouts", every=True, settings=TWO_REPLICAS),
        # weight sync
        _fault("coordinator-rollouts", "coordinator", "rollouts"),
        _fault("coordinator-sync", "coordinator", "sync"),
        _fault("coordinator-twice", "coordinator", "sync", times=2),
        _fault("coordinator-start", "coordinator", "start"),
        _fault("coordinator-freeze", "coordinator", "sync", "freeze", seconds=15.0),
        _fault("coordinator-frozen", "coordinator", "sync", "freeze"),
        # learners
        _fault("learner-update", "learner", "update", settings=TWO_RANKS),
        _fault("learner-twice", "learner", "update", times=2, settings=TWO_RANKS),
        _fault("learner-sync", "learner", "sync"),
        _fault("learner-checkpoint", "learner", "checkpoint", settings=TWO_RANKS),
        _fault("learner-start", "learner", "start", error="LearnerLostError"),
        _fault("learner-frozen", "learner", "update", "freeze", settings=TWO_RANKS),
        # runners, the store, the agent
        _fault("runner-rollouts", "runner", "rollouts"),
        _fault("runners-all", "runner", "rollouts", every=True),
        _fault("runner-frozen", "runner", "rollouts", "freeze"),
        _fault("runner-start", "runner", "start"),
        _fault("store-rollouts", "store", "rollouts"),
        _fault("store-twice", "store", "rollouts", times=2),
        _fault("store-start", "store", "start"),
        _fault("store-shutdown", "store", "shutdown"),
        _fault("store-freeze", "store", "rollouts", "freeze", seconds=20.0),
        _fault("store-frozen", "store", "rollouts", "freeze"),
        _fault("program", "program", "rollouts", may_fail=1, settings={"program": True}),
        # Ray, the node, the disk
        _fault("gcs", "GCS", "rollouts", error=LOST),
        _fault("gcs-start", "GCS", "start", error=LOST),
        _fault("gcs-freeze", "GCS", "rollouts", "freeze", seconds=10.0),
        _fault("raylet", "raylet", "rollouts", error=LOST),
        _fault("raylet-sync", "raylet", "sync", error=LOST),
        _fault("raylet-freeze", "raylet", "rollouts", "freeze", seconds=10.0),
        _fault("dashboard-agent", "dashboard agent", "rollouts", error=LOST),
        _fault("node", "", "rollouts", "remove the node", settings=TWO_REPLICAS),
        _fault(
            "node-and-replica", "replica", "rollouts", "replace the node", settings={"learner_node": True}
        ),
        _fault("disk", "", "rollouts", "fill the disk", error="DiskError"),
        # the driver
        _fault("driver-rollouts", "driver", "rollouts", error=""),
        _fault("driver-start", "driver", "start", error=""),
        _fault("driver-sync", "driver", "sync", error=""),
        _fault("driver-checkpoint", "driver", "checkpoint", error=""),
        _fault("driver-shutdown", "driver", "shutdown", error=""),
        _fault("driver-freeze", "driver", "sync", "freeze", seconds=20.0),
        _fault("interrupt", "driver", "rollouts", "interrupt", error=""),
        _fault("interrupt-start", "driver", "start", "interrupt", error=""),
        _fault("interrupt-twice", "driver", "rollouts", "interrupt", times=2, error=""),
        _fault("interrupt-thrice", "driver", "rollouts", "interrupt", times=3, error=""),
        _fault("terminate", "driver", "rollouts", "terminate", error=""),
        # any part, at random moments
        _fault("haproxy-random", "HAProxy", "random"),
        _fault("replica-random", "replica", "random"),
        _fault("coordinator-random", "coordinator", "random"),
        _fault("learner-random", "learner", "random"),
        _fault("runner-random", "runner", "random"),
        _fault("store-random", "store", "random"),
        _fault("driver-random", "driver", "random", error=""),
    )
}


def _asynchronous(prefix: str, fault: Fault, **settings: Any) -> Fault:
    """Return the same fault in an asynchronous run."""
    return replace(fault, name=f"{prefix}-{fault.name}", settings={**fault.settings, **settings})


WAIT: dict[str, Any] = {"max_staleness": 2}
MASK: dict[str, Any] = {"max_staleness": 2, "stale": "mask"}
ASYNCHRONOUS = [
    # a start is the same in all runs
    *(_asynchronous("wait", fault, **WAIT) for fault in SYNCHRONOUS.values() if fault.when != "start"),
    *(_asynchronous("mask", fault, **MASK) for fault in SYNCHRONOUS.values() if fault.when == "random"),
    _fault("wait-driver-buffer", "driver", "full buffer", error="", settings={**WAIT, "holds": True}),
    _fault("mask-driver-buffer", "driver", "full buffer", error="", settings={**MASK, "holds": True}),
]
FAULTS = SYNCHRONOUS | {fault.name: fault for fault in ASYNCHRONOUS}
"""All faults: of synchronous runs, and, with the prefixes wait- and mask-, of asynchronous ones with this
`stale` and a `max_staleness` of 2."""
CI = ("haproxy-rollouts", "replica-rollouts", "coordinator-sync", "store-rollouts", "wait-driver-buffer")
"""Faults that every CI run injects."""
