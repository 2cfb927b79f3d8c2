"""Records of trained tokens: the learners' log-prob and the advantage of each, a file for each step.

The store has what was sampled. These files have what the learners computed of it, to look at; nothing reads
them to train.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raylight._utils.files import write_atomic
from raylight.types import LogprobArray

TOKENS_FOLDER = "tokens"
"""Folder of the files in the run directory."""
_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True, eq=False)
class RowRecord:
    """Log-probs and advantages of one row of a batch. The arrays have one entry for each token from the
    first trained one on, observations included."""

    index: int
    """Index of the row in the batch."""
    start: int
    """Number of tokens before the first trained one."""
    logprobs: LogprobArray
    """The learners' log-probs before the update; NaN where they were not computed."""
    advantages: LogprobArray
    """NaN where a token was not trained."""


class RecordedRow(NamedTuple):
    """A recorded row of a step."""

    start: int
    logprobs: LogprobArray
    advantages: LogprobArray


class TokenRecords:
    """The files of a run.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / TOKENS_FOLDER

    def write(self, step: int, rows: Iterable[RowRecord], rollout_ids: Sequence[str]) -> None:
        """Write the rows of a step, and remove rows of later steps, which are taken again.

        Args:
            rollout_ids: rollout of each row of the batch.

        Raises:
            OSError: the file cannot be written.
        """
        from safetensors.numpy import save

        unique = {row.index: row for row in rows}  # a row can be on several ranks
        ordered = [unique[index] for index in sorted(unique)]
        if not ordered:
            return
        tensors = {
            "start": np.array([row.start for row in ordered], np.int32),
            "length": np.array([len(row.advantages) for row in ordered], np.int32),
            "logprobs": np.concatenate([row.logprobs for row in ordered]).astype(np.float32),
            "advantages": np.concatenate([row.advantages for row in ordered]).astype(np.float32),
        }
        owners = json.dumps([rollout_ids[row.index] for row in ordered])
        self._folder.mkdir(exist_ok=True)
        for file in self._folder.iterdir():
            found = _NAME.fullmatch(file.name)
            if found and int(found[1]) > step:
                file.unlink(missing_ok=True)
        write_atomic(self._file(step), save(tensors, {"rollouts": owners, "untrained": "nan"}))

    def has(self, step: int) -> bool:
        """Return True if there is a file of the step."""
        return self._file(step).is_file()

    def read(self, step: int, rollout_ids: Iterable[str]) -> dict[str, list[RecordedRow]]:
        """Return the rows of some rollouts in the order of the batch; a rollout that was not trained, or is
        not recorded, has none."""
        from safetensors import safe_open

        file = self._file(step)
        found: dict[str, list[RecordedRow]] = {name: [] for name in rollout_ids}
        if not file.is_file():
            return found
        with safe_open(file, "numpy") as tensors:
            owners = json.loads(tensors.metadata()["rollouts"])
            zeros_are_untrained = "untrained" not in tensors.metadata()  # in files of earlier versions
            lengths = tensors.get_tensor("length")
            starts = tensors.get_tensor("start")
            ends = np.cumsum(lengths)
            logprobs, advantages = tensors.get_slice("logprobs"), tensors.get_slice("advantages")
            for owner, start, length, end in zip(owners, starts, lengths, ends, strict=True):
                if owner in found:
                    part = slice(int(end - length), int(end))
                    own = advantages[part]
                    own = np.where(own == 0, np.float32("nan"), own) if zeros_are_untrained else own
                    found[owner].append(RecordedRow(int(start), logprobs[part], own))
        return found

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step}.safetensors"
