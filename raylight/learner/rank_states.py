"""A rank's part of the run's training states: copied, written in the background, and loaded."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from raylight.experience.checkpoints import BackgroundWriter, TrainingStates
from raylight.learner import state, state_files
from raylight.learner.trained_model import TrainedModel

WRITING_TIMEOUT = datetime.timedelta(days=1)
"""Longest wait of a rank that has written its part of a state for the others. `checkpoint.write_timeout_s`
ends a write earlier, and the death of a rank at once."""


class RankStates:
    """Saves and loads the training state of a policy. `save` and `load` are collectives, as is making one."""

    def __init__(self, policy: TrainedModel) -> None:
        self._policy = policy
        self._writer, self._copies = BackgroundWriter(), state_files.HostCopies()
        self._group: Any = dist.new_group(backend="gloo", timeout=WRITING_TIMEOUT)
        """Connections for writing: slow storage may exceed the timeout of a collective of the training, whose
        connections must not be used at the same time."""

    def save(
        self, url: str, step: int, content: str, metadata: dict[str, Any], keep: int, timeout_s: float
    ) -> None:
        """Copy this rank's part of the training state, and write it in the background.

        When all ranks have written, rank 0 marks the state as complete.

        Args:
            content: folder of the tensors, from `TrainingStates.new_content`.
            metadata: JSON values that are stored with the state.
            keep: number of states to keep.
            timeout_s: seconds within which the last state must be written.
        """
        self.finish(timeout_s)
        copies, states = self._copies.copy(state.collect(self._policy)), TrainingStates(url)

        def write() -> None:
            with states.writing(step):
                state_files.write(copies, content, self._group)
            if dist.get_rank() == 0:
                states.complete(step, metadata, content)
                states.prune(keep)

        self._writer.start(write)

    def finish(self, timeout_s: float) -> None:
        """Wait until the last training state is written.

        Raises:
            CheckpointError, DiskError: it could not be written, or not within `timeout_s` seconds.
        """
        self._writer.wait(timeout_s)

    def load(self, url: str, step: int, version: int) -> None:
        """Continue from the training state of a step, and number its weights `version`.

        Step 0 is the model's own files, which are loaded already.
        """
        if step:
            with TrainingStates(url).reading(step) as content:
                state.load(self._policy, content, self._group)
        self._policy.version = version
