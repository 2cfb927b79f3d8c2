"""The bound of staleness, and progress, in a simulation of dispatch, training and publication."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylight.trainer.pacer import Pacer
from raylight.trainer.training_groups import choose_groups


class Simulation:
    """A run whose clock is a heap of events.

    Args:
        order: "wait" takes groups in the order of dispatch, "drop" and "mask" in that of completion.
    """

    def __init__(self, staleness: int, per_step: int, steps: int, rounds: int, order: str, seed: int) -> None:
        self.pacer = Pacer(per_step, staleness, steps, published=0)
        self.staleness, self.steps, self.most, self.order = staleness, steps, per_step * rounds, order
        self.random = random.Random(seed)
        self.sigma, self.dull = self.random.choice([0.0, 1.0, 2.0]), self.random.choice([0.0, 0.4, 1.0])
        self.update_s = self.random.choice([0.0, 1.0, 5.0])
        self.publish_s = self.random.choice([0.0, 1.0, 9.0])
        self.now, self.done, self.busy, self.publishing = 0.0, 0, False, False
        self.events: list[tuple[float, int, str, int]] = []
        self.ties = itertools.count()
        self.begun: dict[int, int] = {}
        """Version that the engines held when a group was dispatched."""
        self.informative: dict[int, bool] = {}
        self.finished: list[int] = []
        self.taken: list[list[int]] = []
        self.dropped: list[int] = []
        self.pending_drops = 0
        self.ages: list[int] = []

    def at(self, delay: float, kind: str, number: int = 0) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.ties), kind, number))

    def room(self) -> int:
        dull = sum(not self.informative[group] for group in self.finished)
        return self.pacer.room(self.pending_drops + min(dull, self.most - self.pacer.groups_per_step))

    def dispatch(self) -> None:
        while self.room():
            group, self.pacer.dispatched = self.pacer.dispatched, self.pacer.dispatched + 1
            assert self.pacer.published is not None
            self.begun[group] = self.pacer.published
            self.informative[group] = self.random.random() >= self.dull
            self.at(self.random.lognormvariate(0, self.sigma), "finish", group)

    def train(self) -> None:
        if self.busy or self.done == self.steps or (not self.staleness and self.pacer.published != self.done):
            return
        if self.order == "drop":
            stale = [group for group in self.finished if self.done - self.begun[group] > self.staleness]
            self.finished = [group for group in self.finished if group not in stale]
            self.dropped += stale
            self.pending_drops += len(stale)
        order = self.finished
        if self.order == "wait":
            first = sum(map(len, self.taken))
            order = list(itertools.takewhile(self.finished.__contains__, itertools.count(first)))
        chosen = choose_groups(order, self.informative.__getitem__, self.pacer.groups_per_step, self.most)
        if chosen is None:
            return
        self.finished = [group for group in self.finished if group not in chosen]
        self.taken.append(chosen)
        self.ages += [self.done - self.begun[group] for group in chosen]
        self.pacer.replaced += len(chosen) + self.pending_drops - self.pacer.groups_per_step
        self.pending_drops, self.busy = 0, True
        self.at(self.update_s, "updated")

    def run(self) -> None:
        while self.done < self.steps or self.busy:
            self.train()
            self.dispatch()
            assert self.events, "nothing can happen any more"
            self.now, _, kind, number = heapq.heappop(self.events)
            if kind == "finish":
                self.finished.append(number)
            elif kind == "updated":
                if self.publishing:  # the publication before must end first
                    self.at(0.1, "updated")
                    continue
                self.done, self.busy, self.publishing = self.done + 1, False, True
                self.at(self.publish_s, "published", self.done)
            else:
                self.pacer.published, self.publishing = number, False


@settings(max_examples=300)
@given(
    staleness=st.integers(0, 4),
    per_step=st.integers(1, 6),
    steps=st.integers(1, 12),
    rounds=st.integers(1, 3),
    order=st.sampled_from(["wait", "drop", "mask"]),
    seed=st.integers(0, 10**6),
)
def test_every_step_is_taken_and_no_group_is_older_than_allowed(
    staleness: int, per_step: int, steps: int, rounds: int, order: str, seed: int
) -> None:
    run = Simulation(staleness, per_step, steps, rounds, order, seed)
    run.run()
    taken = [group for step in run.taken for group in step]
    assert len(run.taken) == steps
    assert len(set(taken)) == len(taken)
    assert not set(taken) & set(run.dropped)
    for step in run.taken:
        informative = sum(run.informative[group] for group in step)
        assert informative == per_step or len(step) == per_step * rounds
    if order != "mask":
        assert max(run.ages) <= staleness
    if order == "wait":
        assert taken == list(range(len(taken)))
        assert not run.dropped
    if not staleness:
        assert run.pacer.dispatched == len(taken) + len(run.finished)


def test_no_group_is_dispatched_that_no_step_trains_on() -> None:
    run = Simulation(8, 3, 4, 1, "wait", seed=0)
    run.run()
    assert run.pacer.dispatched == 12


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_nothing_is_dispatched_before_the_engines_have_the_weights(staleness: int) -> None:
    pacer = Pacer(4, staleness, 100)
    assert pacer.room() == 0
    pacer.published = 7
    assert pacer.room() == (8 + staleness) * 4
    pacer.dispatched = 28
    assert pacer.room() == 4 * (1 + staleness)
    assert pacer.room(to_replace=2) == 4 * (1 + staleness) + 2
