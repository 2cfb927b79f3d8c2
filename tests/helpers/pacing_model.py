"""A model of the asynchronous training loop, whose clock is a heap of events."""

import heapq
import itertools
from collections.abc import Callable

from raylight.trainer.loops.pacer import Pacer
from raylight.trainer.loops.training_groups import choose_groups


class Simulation:
    """Dispatch, training and publication of groups, with the pacer and the choice of the real loop.

    Args:
        pacer: fresh.
        rounds: `max_rounds` of the algorithm.
        order: "wait" takes groups in the order of dispatch, "drop" and "mask" in that of completion.
        duration: seconds that the rollouts of a group take.
        is_informative: tells if the rewards of a group differ.
        update_s, publish_s: seconds of an update and of a publication.
    """

    def __init__(
        self,
        pacer: Pacer,
        rounds: int,
        order: str,
        duration: Callable[[int], float],
        is_informative: Callable[[int], bool] = lambda group: True,
        update_s: float = 0.0,
        publish_s: float = 0.0,
    ) -> None:
        pacer.published = 0
        self.pacer, self.order, self.most = pacer, order, pacer.groups_per_step * rounds
        self.duration, self.is_informative = duration, is_informative
        self.update_s, self.publish_s = update_s, publish_s
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
        """Age of each taken group at its update, in steps."""
        self.taken_at: list[float] = []
        """Time at which each step had its groups."""

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
            self.informative[group] = self.is_informative(group)
            self.at(self.duration(group), "finish", group)

    def train(self) -> None:
        if (
            self.busy
            or self.done == self.pacer.total_steps
            or (not self.pacer.max_staleness and self.pacer.published != self.done)
        ):
            return
        if self.order == "drop":
            stale = [
                group for group in self.finished if self.done - self.begun[group] > self.pacer.max_staleness
            ]
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
        self.taken_at.append(self.now)
        self.ages += [self.done - self.begun[group] for group in chosen]
        self.pacer.replaced += len(chosen) + self.pending_drops - self.pacer.groups_per_step
        self.pending_drops, self.busy = 0, True
        self.at(self.update_s, "updated")

    def run(self) -> None:
        """Take all steps.

        Raises:
            AssertionError: nothing can happen any more, although steps are left.
        """
        while self.done < self.pacer.total_steps or self.busy:
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
