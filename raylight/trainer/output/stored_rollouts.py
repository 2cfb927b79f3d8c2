"""The rollouts in the store of a run, read a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from raylight.errors import ConfigError
from raylight.store.overview import RolloutLine, RolloutOverview
from raylight.store.reading import StoreReader
from raylight.store.service import StoreService
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.types import FinishedRollout

STORE_FILES = ("store.db", "eval.db")
"""Names of the store in the directory of a training run and of an evaluation."""
LINES, ROLLOUTS = 1000, 64
"""Lines and whole rollouts that are read at a time."""


class StoredRollouts:
    """Reader of a run's rollouts, even while the run is in progress. It holds a few of them at a time.

    Args:
        path: run directory, or the file of its store.

    Raises:
        ConfigError: the store does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = store_file(Path(path).expanduser())

    def lines(self) -> Iterator[RolloutLine]:
        """Yield a short row for each rollout, in the order in which they were enqueued."""
        overview = RolloutOverview(self.file)
        try:
            position = 0
            while lines := overview.lines_after(position, LINES):
                yield from lines
                position = lines[-1].position
        finally:
            overview.close()

    def read(self, rollout_ids: Sequence[str]) -> Iterator[FinishedRollout]:
        """Yield rollouts with their spans, tokens and rewards, in the order of their ids."""
        for start in range(0, len(rollout_ids), ROLLOUTS):
            yield from run_blocking(self._collect(rollout_ids[start : start + ROLLOUTS]))

    async def _collect(self, rollout_ids: Sequence[str]) -> list[FinishedRollout]:
        service = StoreService(self.file, read_only=True)
        try:
            return await StoreReader(service).collect(rollout_ids, with_spans=True, with_span_tokens=False)
        finally:
            await service.close()


def store_file(path: Path) -> Path:
    """Return the file of a store.

    Args:
        path: run directory, or the file itself.

    Raises:
        ConfigError: the store does not exist.
    """
    candidates = [path / name for name in STORE_FILES] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"there is no store at {path}; give a run directory, which contains {' or '.join(STORE_FILES)}"
    )
