"""The recorded rollouts of a run, read from its directory, even while the run is in progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from raylight._utils.files import read_bounded
from raylight._utils.printable import printable
from raylight.errors import UnknownIdError
from raylight.experience.trajectories.row_rules import RowRules
from raylight.experience.trajectories.transcript import transcript, transcript_json
from raylight.store.reading import StoreReader
from raylight.store.service import StoreService
from raylight.trainer.output.stored_rollouts import store_file
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.types import FINISHED, FinishedRollout, JsonObject

MAX_CONFIG_BYTES, MAX_CONFIG_VALUES = 2 * 1024 * 1024, 100_000
"""Limits of a `config.yaml`; 100 characters count as a value."""
UNSUCCESSFUL = sorted(FINISHED - {"succeeded"})


def read_rollouts(
    path: str | Path,
    *,
    rollout_ids: Sequence[str] | None = None,
    failed: bool = False,
    last: int | None = None,
) -> list[FinishedRollout]:
    """Return rollouts with their spans, tokens and rewards, in the order in which they were enqueued.

    Args:
        path: run directory, or the file of its store.
        rollout_ids: return only these.
        failed: return only rollouts that did not succeed.
        last: return only this number of rollouts from the end.

    Raises:
        ConfigError: the store does not exist.
        UnknownIdError: the store does not have one of `rollout_ids`.
    """
    file = store_file(Path(path))

    async def read() -> list[FinishedRollout]:
        service = StoreService(file, read_only=True)
        try:
            store = StoreReader(service)
            if rollout_ids:
                known = {state.rollout_id for state in await store.get_rollout_states(rollout_ids)}
                if missing := set(rollout_ids) - known:
                    raise UnknownIdError(f"{file} has no rollout {', '.join(sorted(missing))}")
            statuses = [status for status in UNSUCCESSFUL if failed] or None
            limit, offset = -1, 0
            if last is not None:  # the inputs of 10^5 rollouts take seconds and hundreds of megabytes
                counted = await store.query_rollouts(status_in=statuses, rollout_id_in=rollout_ids, limit=1)
                limit, offset = last, max(counted.total - last, 0)
            page = await store.query_rollouts(
                status_in=statuses, rollout_id_in=rollout_ids, limit=limit, offset=offset
            )
            chosen = [rollout.rollout_id for rollout in page]
            return await store.collect(chosen, with_spans=True)
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
    as_json: bool = False,
) -> int:
    """Print the messages, tools, rewards and failures of rollouts; return the number of rollouts.

    Args:
        path, rollout_ids, failed, last: as for `read_rollouts`.
        full: print all attributes of all spans without cuts.
        as_json: print one JSON object per line and rollout.
    """
    rollouts = read_rollouts(path, rollout_ids=rollout_ids, failed=failed, last=last)
    rules = RowRules.from_config(read_config(store_file(Path(path)).parent) or {})
    for finished in rollouts:
        if as_json:
            print(json.dumps(transcript_json(finished, full=full, rules=rules)))
        else:
            print(printable(transcript(finished, full=full, rules=rules)) + "\n")
    return len(rollouts)


def read_config(folder: Path) -> JsonObject | None:
    """Return the content of a run's `config.yaml`; None if it cannot be read, or is none."""
    try:
        text = read_bounded(folder / "config.yaml", MAX_CONFIG_BYTES).decode()
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        is_small = _size(content, {}) <= MAX_CONFIG_VALUES
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return content if isinstance(content, dict) and is_small else None


def _size(value: object, sizes: dict[int, int]) -> int:
    """Return the number of values within a value, in which aliases may repeat one many times.

    Args:
        sizes: sizes of the lists and dicts so far, by id.
    """
    if not isinstance(value, dict | list):
        return 1 + (len(value) // 100 if isinstance(value, str | bytes) else 0)
    if id(value) not in sizes:
        sizes[id(value)] = MAX_CONFIG_VALUES + 1  # of one that contains itself
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_size(one, sizes) for one in inner)
    return sizes[id(value)]
