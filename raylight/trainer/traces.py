"""What a run recorded, read from its folder, also while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raylight.errors import ConfigError, UnknownIdError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.transcript import transcript
from raylight.trainer.blocking import run_blocking
from raylight.types import FINISHED, FinishedRollout

STORES = ("store.db", "eval.db")
"""Of training and of an evaluation."""


def read_rollouts(
    path: str | Path,
    *,
    rollout_ids: Sequence[str] | None = None,
    failed: bool = False,
    last: int | None = None,
) -> list[FinishedRollout]:
    """Rollouts with their spans, tokens and rewards, in the order in which they were enqueued.

    Args:
        path: a run's folder, or the file of its store.
        rollout_ids: only these.
        failed: only those that did not succeed.
        last: only the last so many.

    Raises:
        ConfigError: there is no store.
        UnknownIdError: a rollout is not in it.
    """
    file = _store_of(Path(path))

    async def read() -> list[FinishedRollout]:
        service = StoreService(file, read_only=True)
        try:
            store = StoreClient(service)
            found = await store.query_rollouts(rollout_id_in=rollout_ids)
            if missing := set(rollout_ids or ()) - {rollout.rollout_id for rollout in found}:
                raise UnknownIdError(f"no rollout {', '.join(sorted(missing))} in {file}")
            chosen = [
                rollout.rollout_id
                for rollout in found
                if not failed or rollout.status in FINISHED - {"succeeded"}
            ]
            return await store.collect(
                chosen if last is None else chosen[max(len(chosen) - last, 0) :], with_spans=True
            )
        finally:
            await service.close()

    return run_blocking(read())


def print_traces(
    path: str | Path,
    *,
    rollout_ids: Sequence[str] | None = None,
    failed: bool = False,
    last: int | None = None,
    full: bool = False,
) -> int:
    """Print what was recorded of rollouts: messages, tools, rewards, failures. Returns how many there are.

    Args:
        path, rollout_ids, failed, last: as in `read_rollouts`.
        full: show every attribute of every span, whole.
    """
    found = read_rollouts(path, rollout_ids=rollout_ids, failed=failed, last=last)
    for finished in found:
        print(transcript(finished, full=full) + "\n")
    return len(found)


def _store_of(path: Path) -> Path:
    candidates = [path / name for name in STORES] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"there is no store at {path}: name a run's folder, in which there is {' or '.join(STORES)}"
    )
