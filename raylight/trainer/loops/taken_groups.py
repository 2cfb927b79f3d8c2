"""The groups of rollouts that the training steps of a run took: nearly all below a number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from raylight.types import StepGroups


class TakenGroups:
    """Numbers of the groups that steps took: all below `next` but for the open ones."""

    def __init__(self, next_group: int = 0, open_groups: Iterable[int] = ()) -> None:
        self.next, self.open = next_group, set(open_groups)

    def add(self, step: StepGroups) -> None:
        """Mark the groups of a step as taken."""
        groups = set(step.all)
        end = max(self.next, *(group + 1 for group in groups))
        self.open = (self.open | set(range(self.next, end))) - groups
        self.next = end

    def rest(self, start: int = 0) -> Iterator[int]:
        """Yield the groups from `start` on that no step took, in order, without an end."""
        yield from sorted(group for group in self.open if group >= start)
        yield from itertools.count(max(self.next, start))

    def __len__(self) -> int:
        return self.next - len(self.open)

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of an equal object."""
        return {"next_group": self.next, "open_groups": sorted(self.open)}
