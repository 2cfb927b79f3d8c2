"""The work of one rank on its model, in whichever process it is: its results, files and training states."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from raylight._utils.disk import disk_errors
from raylight.engines.protocol import LoraAdapter
from raylight.experience.batches.token_records import RowRecord
from raylight.learner.model import weights
from raylight.learner.state import state, state_files
from raylight.learner.state.checkpoints import BackgroundWriter, TrainingStates
from raylight.learner.updates.policy_set import PolicySet
from raylight.learner.updates.trained_model import TrainedModel
from raylight.types import JsonObject

WRITING_TIMEOUT = datetime.timedelta(days=1)
"""Longest wait of a rank that has written its part of a state for the others. `checkpoint.write_timeout_s`
ends a write earlier, and the death of a rank at once."""


class ModelRank:
    """A rank's model with its part of the run's training states.

    All methods but `row_records` and `finish_saving` are collectives, as is making one.
    """

    def __init__(self, model: TrainedModel | PolicySet) -> None:
        self._model = model
        self._writer, self._copies = BackgroundWriter(), state_files.HostCopies()
        self._group = dist.new_group(backend="gloo", timeout=WRITING_TIMEOUT)
        """Connections for writing: slow storage may exceed the timeout of a collective of the training, whose
        connections must not be used at the same time."""

    def row_records(self) -> list[RowRecord]:
        """Return what the last update computed of this rank's rows."""
        return self._model.row_records

    def _find(self, name: str) -> TrainedModel:
        """Return a model of a run with several, ready to compute; the name of the only model is empty."""
        return self._model.use(name) if isinstance(self._model, PolicySet) else self._model

    def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        """Return the log-probs of `ids[1:]`, see `TrainedModel.logprobs`."""
        return self._find(model).logprobs(ids)

    def export_adapter(self, model: str = "") -> tuple[int, LoraAdapter] | None:
        """Return the version and the adapter on rank 0, else None."""
        found = self._find(model)
        adapter = found.export_adapter()
        return None if adapter is None else (found.version, LoraAdapter(*adapter))

    def save(self, folder: str, adapters: Mapping[str, LoraAdapter] | None = None) -> None:
        """Write the model in Hugging Face format, see `weights.save_model`; several each to a subfolder.

        Args:
            adapters: versions of adapters by model, in place of the current ones.
        """
        adapters = adapters or {}
        with disk_errors(folder):
            if not isinstance(self._model, PolicySet):
                weights.save_model(self._model.engine, folder, adapters.get(""))
                return
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name in self._model.policies:
                engine = self._find(name).engine
                weights.save_model(engine, str(Path(folder, name)), adapters.get(name))

    def save_state(
        self, url: str, step: int, content: str, metadata: JsonObject, keep: int, timeout_s: float
    ) -> None:
        """Copy this rank's part of the training state, and write it in the background.

        When all ranks have written, rank 0 marks the state as complete.

        Args:
            content: folder of the tensors, from `TrainingStates.new_content`.
            metadata: JSON values that are stored with the state.
            keep: number of states to keep.
            timeout_s: seconds within which the last state must be written.
        """
        self.finish_saving(timeout_s)
        copies, states = self._copies.copy(state.collect(self._model)), TrainingStates(url)

        def write() -> None:
            with states.writing(step):
                state_files.write(copies, content, self._group)
            if dist.get_rank() == 0:
                states.complete(step, metadata, content)
                states.prune(keep)

        self._writer.start(write)

    def finish_saving(self, timeout_s: float) -> None:
        """Wait until the last training state is written.

        Raises:
            CheckpointError, DiskError: it could not be written, or not within `timeout_s` seconds.
        """
        self._writer.wait(timeout_s)

    def load_state(self, url: str, step: int, version: int) -> None:
        """Continue from the training state of a step, and number its weights `version`.

        Step 0 is the model's own files, which are loaded already.
        """
        if step:
            with TrainingStates(url).reading(step) as content:
                state.load(self._model, content, self._group)
        self._model.version = version
