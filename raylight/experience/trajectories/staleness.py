"""Staleness of sampled tokens: the number of updates between the weights that sampled a token and those that
it updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from raylight.experience.trajectories.trajectory import Trajectories
from raylight.types import Generation, Trajectory


@dataclass(frozen=True)
class TokenAges:
    """Ages of the tokens of a batch, in versions of the weights. A trajectory is a row."""

    staleness_mean: float = 0.0
    """Over trained tokens."""
    staleness_max: int = 0
    trajectory_mean: float = 0.0
    """Over trajectories: the age of the oldest token, masked as stale or not."""
    trajectory_max: int = 0
    versions_mean: float = 0.0
    """Over trajectories: the number of versions that sampled their tokens."""
    versions_max: int = 0


@dataclass(frozen=True)
class StaleMask:
    """Leaves tokens that are too old out of the loss.

    Args:
        version: the learners' version before the update.
        limit: highest staleness of a trained token.
    """

    version: int
    limit: int

    def apply(self, trajectories: Trajectories) -> Trajectories:
        """Return the trajectories with stale tokens masked."""
        return replace(trajectories, rows=[self._mask(row) for row in trajectories.rows])

    def _mask(self, row: Trajectory) -> Trajectory:
        keep = (row.mask == 1) & (self.version - row.weight_versions <= self.limit)
        if int(keep.sum()) == row.trained_tokens:
            return row
        return replace(
            row,
            mask=keep,
            logprobs=np.where(keep, row.logprobs, 0),
            weight_versions=np.where(keep, row.weight_versions, -1),
        )


def describe_ages(version: int, trained: Iterable[Trajectory], sampled: Iterable[Trajectory]) -> TokenAges:
    """Return the ages of a batch's tokens.

    Args:
        version: the learners' version before the update.
        trained: rows of the batch.
        sampled: rows of all rollouts of the batch, before stale tokens were masked.
    """
    tokens = [row.weight_versions[row.mask == 1] for row in trained]
    rows = [versions for row in sampled if len(versions := row.weight_versions[row.mask == 1])]
    staleness = version - np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    oldest = [version - int(versions.min()) for versions in rows]
    spans = [len(np.unique(versions)) for versions in rows]
    return TokenAges(
        float(staleness.mean()) if len(staleness) else 0.0,
        int(staleness.max(initial=0)),
        float(np.mean(oldest)) if rows else 0.0,
        max(oldest, default=0),
        float(np.mean(spans)) if rows else 0.0,
        max(spans, default=0),
    )


def oldest_version(calls: Iterable[Generation]) -> int | None:
    """Return the oldest version that sampled a token of these calls, forced tokens left out; None if there is
    no token."""
    return min((int(part.min()) for part in _versions(calls)), default=None)


def newest_version(calls: Iterable[Generation]) -> int | None:
    """Return the newest version that sampled a token of these calls, as `oldest_version` does."""
    return max((int(part.max()) for part in _versions(calls)), default=None)


def _versions(calls: Iterable[Generation]) -> Iterator[np.ndarray]:
    """Yield the versions, shape (tokens,), of each call with tokens, without forced tokens."""
    for call in calls:
        masks_forced = len(call.allowed) and not call.is_replayed
        versions = call.weight_versions[call.allowed != 1] if masks_forced else call.weight_versions
        if len(versions):
            yield versions
