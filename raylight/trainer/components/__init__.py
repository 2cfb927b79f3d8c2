"""The components of a run: its store, its runners, the models that it serves, and its learners.

Each is one class. `open` starts what other components need, and registers what stops it. `start` waits until
the component is up. None depends on the insides of another.
"""

from collections.abc import Coroutine
from typing import Protocol


class Component(Protocol):
    """A component, as a run watches it."""

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return coroutines that run while the run works, and fail if the component has failed for good. By
        default none: whatever calls the component finds its failure, or another part of the run does."""
        return []

    async def counts(self) -> dict[str, int]:
        """Return counters for the summary of the run."""
        return {}
