"""Export of a run's rollouts as training data, one rollout at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raylight._utils.printable import encodable
from raylight.errors import DatasetError
from raylight.experience.trajectories.exported_traces import FORMATS, Record, dpo_record
from raylight.experience.trajectories.rollout_selection import RolloutSelection
from raylight.experience.trajectories.row_rules import RowRules, learned_rows
from raylight.images.image import media_type_of, to_data_url
from raylight.images.messages import inline_images, recorded_images
from raylight.store.service import image_folder
from raylight.trainer.output.run_records import read_config
from raylight.trainer.output.stored_rollouts import StoredRollouts

ROW_FORMATS = ("sft", "messages")
"""Formats of which each record has a row of a rollout."""
PAIRED = "dpo"
"""Format of which each record has two rollouts."""


@dataclass
class ExportCounts:
    """Numbers of an export."""

    selected: int = 0
    """Rollouts, or pairs of them, that the selection chose."""
    written: int = 0
    """Lines."""
    left_out: int = 0
    """Rollouts or pairs without a chat call, or pairs of equal answers."""
    rows_left_out: int = 0
    """Rows without a chat call, of the other rollouts."""
    below_best: int = 0
    """Rollouts with a lower reward than the best of their group, if the selection has no limit for them."""
    best_reward: float = -math.inf
    """Highest reward of the selected rollouts, if `below_best` was counted."""


def export_traces(run: str | Path, kind: str, selection: RolloutSelection, output: IO[bytes]) -> ExportCounts:
    """Write the selected rollouts of a run as JSON lines; return the counts. Images are data URLs.

    Args:
        run: run directory, or the file of a store.
        kind: `sft`, `dpo`, `messages` or `jsonl`.
        output: receives UTF-8.

    Raises:
        ConfigError: the store does not exist.
        DatasetError: the selection has no rollouts.
        ImageError: the file of an image is missing.
    """
    stored, counts = StoredRollouts(run), ExportCounts()
    images = image_folder(stored.file)
    for records in _records(stored, kind, selection, counts):
        empty = True
        for record in records:
            empty = False
            files = images.read(set(recorded_images(record)))
            urls = {
                name: to_data_url(data, media_type_of(data) or "image/png") for name, data in files.items()
            }
            line = inline_images(record, urls) if urls else record
            output.write(encodable(json.dumps(line, ensure_ascii=False)).encode() + b"\n")
            counts.written += 1
        counts.left_out += empty
    return counts


def _records(
    stored: StoredRollouts, kind: str, selection: RolloutSelection, counts: ExportCounts
) -> Iterator[Iterable[Record]]:
    rules = RowRules.from_config(read_config(stored.file.parent) or {})
    if kind == PAIRED:
        pairs = selection.pairs(stored.lines())
        counts.selected = _checked(len(pairs), stored, "group whose rewards differ")
        rollouts = stored.read([rollout_id for pair in pairs for rollout_id in pair])
        for chosen, rejected in zip(rollouts, rollouts, strict=True):  # consecutive ones
            record = dpo_record(chosen, rejected, rules)
            yield [] if record is None else [record]
        return
    chosen_ids = selection.choose(stored.lines())
    counts.selected = _checked(len(chosen_ids), stored, "rollout that succeeded")
    if kind in ROW_FORMATS and selection.takes_all:
        counts.below_best, counts.best_reward = selection.below_best(stored.lines())
    for finished in stored.read(chosen_ids):
        records = FORMATS[kind](finished, rules)
        if records and kind in ROW_FORMATS:
            counts.rows_left_out += len(learned_rows(finished, rules)) - len(records)
        yield records


def _checked(count: int, stored: StoredRollouts, what: str) -> int:
    if not count:
        raise DatasetError(
            f"{stored.file} has no {what} within the limits; lower --min-reward, choose another --split, or "
            "give another run"
        )
    return count
