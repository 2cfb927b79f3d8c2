"""The number of groups of rollouts that may be in progress, so that no token gets older than allowed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pacer:
    """Counts groups, and says how many more may be dispatched.

    A group may be dispatched while `dispatched - replaced < (published + 1 + max_staleness) *
    groups_per_step`. If groups are trained in the order of dispatch, the weights of an update are then at
    most `max_staleness` versions newer than those that sampled any of its tokens.

    It has no clock, waits for nothing, and holds no rollouts.

    Args:
        groups_per_step: groups that a step trains on, besides those that are replaced.
        max_staleness: largest age of a token at its update, in steps.
        total_steps: number of steps of the run; no group is dispatched that none of them trains on.
    """

    groups_per_step: int
    max_staleness: int
    total_steps: int
    dispatched: int = 0
    """Groups that were dispatched so far, those that earlier processes of the run took included."""
    replaced: int = 0
    """Groups that were dispatched in addition to `groups_per_step` for each step: those that were dropped,
    and those that gave nothing to learn and had a replacement."""
    published: int | None = None
    """Last step whose weights the engines hold; 0: the initial weights; None: they hold other weights, and
    nothing may be sampled."""

    def room(self, to_replace: int = 0) -> int:
        """Return the number of groups that may be dispatched now.

        Args:
            to_replace: finished groups of the next step that will be counted in `replaced`.
        """
        if self.published is None:
            return 0
        steps = min(self.published + 1 + self.max_staleness, self.total_steps)
        return max(steps * self.groups_per_step - (self.dispatched - self.replaced - to_replace), 0)
