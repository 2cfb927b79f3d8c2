"""A fault: what is done to which process of a run, when, and what the run is expected to do."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from chaos_events import Event, Predicate
from chaos_log import HELD_ROLLOUTS, TASKS

Action = Literal[
    "kill",
    "freeze",
    "interrupt",
    "terminate",
    "fill the disk",
    "break the disk",
    "remove the node",
    "replace the node",
    "set the clock",
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
    """Match the group after which all groups wait to be trained, except groups with a held rollout."""
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
        target: kind of process, a key of `chaos_processes.TARGETS`.
        when: key of MOMENTS, or "random".
        action: with "replace the node" the node that has the learners, while the target is killed.
        signals: number of times that Ctrl-C is pressed.
        seconds: time after which a frozen process continues, or before the next fault, if the run has
            recovered meanwhile; None: never.
        clock_s: seconds by which the wall clock of all processes is set forward, after a kill before the run
            is resumed.
        every: do it to all processes of the kind, not only to the first.
        error: name of the error that ends the driver; "" if it ends as by a signal. None: the run goes on. A
            run that ended is resumed with `resume="auto"`.
        may_fail: number of rollouts that the fault itself may fail.
    """

    target: str
    when: str
    action: Action = "kill"
    signals: int = 1
    seconds: float | None = None
    clock_s: int = 0
    every: bool = False
    error: str | None = None
    may_fail: int = 0

    @property
    def name(self) -> str:
        """Target, moment and action as a part of a test's name."""
        words = f"{'all ' if self.every else ''}{self.target} {self.when} {self.action}"
        if self.seconds is not None:
            words += f" {self.seconds:g}s"
        if self.clock_s:
            words += f" {self.clock_s:+d}s"
        if self.signals > 1:
            words += f" {self.signals}"
        return words.strip().replace(" ", "-").lower()

    @property
    def prelude(self) -> list[Predicate]:
        """Events after which the target of a run's first fault is looked up, shortly before the moment. The
        search misses a moment that passes meanwhile, so it begins early for one that comes once."""
        return [] if self.when in ("start", "full buffer") else [is_step(FIRST_STEP)]

    def moment(self, seed: str) -> list[Predicate]:
        """Return the events that the fault waits for."""
        if self.when == "random":
            return [is_of_run] * random.Random(f"{seed} {self.name}").randint(1, RANDOM_EVENTS)
        return MOMENTS[self.when]

    @property
    def description(self) -> str:
        """The target and the action in words."""
        words = f"{'every ' if self.every else ''}{self.target} {self.action}"
        if self.action == "freeze":
            words += f" for up to {self.seconds:g} s" if self.seconds else " for good"
        if self.clock_s:
            words += f", clock {self.clock_s:+d} s"
        return words.strip() + {1: "", 2: ", twice", 3: ", three times"}[self.signals]


class Recovery:
    """The recovery of a run from a fault: the end of the next rollout that began after it, and of the next
    step whose update did.

    Args:
        since: time of the fault, or of the start of the driver that resumes the run.
    """

    def __init__(self, since: float, events: Iterable[Event] = ()) -> None:
        self._since = since
        self._begun: set[str] = set()
        self._updated = False
        self.rollout_at: float | None = None
        self.step_at: float | None = None
        for event in events:
            self(event)

    def __call__(self, event: Event) -> bool:
        """Note an event; return True if the run has recovered."""
        if event.at > self._since:
            if event.kind == "begun":
                self._begun.add(event.fields["attempt"])
            elif event.kind == "finished" and event.fields["attempt"] in self._begun:
                self.rollout_at = self.rollout_at or event.at
            elif event.kind == "update":
                self._updated = True
            elif event.kind == "step" and self._updated:
                self.step_at = self.step_at or event.at
        return self.rollout_at is not None and self.step_at is not None
