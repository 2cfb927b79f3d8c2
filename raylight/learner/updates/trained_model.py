"""The model that a rank trains, and its frozen reference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from raylight.config import LearnerConfig
from raylight.experience.batches.token_records import RowRecord
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.settings.supervised_settings import RankingSettings, SupervisedSettings
from raylight.learner.faults import GradientGuard
from raylight.learner.model import weights
from raylight.learner.model.fsdp import RaylightEngine
from raylight.learner.model.verl_engines import build_policy, build_reference, build_reward_model
from raylight.learner.tokens.rows import TrainRow, make_probe_row
from raylight.types import JsonObject


class TrainedModel:
    """A model on verl's FSDP2 engine, with the initial model as its reference if the settings need one.

    Every method is a collective that all ranks call with the same arguments.

    Args:
        model_path: folder of a Hugging Face model.
        total_steps: updates of the model, for the learning-rate schedule.
        module: model in this process that is trained in place; None loads one.
        engine: an engine that other models share; None builds one.
    """

    def __init__(
        self,
        model_path: str,
        config: LearnerConfig,
        settings: PolicySettings | SupervisedSettings,
        total_steps: int,
        module: torch.nn.Module | None = None,
        engine: RaylightEngine | None = None,
    ) -> None:
        self.engine: RaylightEngine
        if engine is not None:
            self.engine = engine
        elif isinstance(settings, RankingSettings):
            self.engine = build_reward_model(model_path, config, settings, total_steps)
        else:
            self.engine = build_policy(model_path, config, settings, total_steps, module)
        # with LoRA the reference is the trained model without its adapter
        separate_reference = settings.needs_reference and config.lora is None
        self._reference = build_reference(model_path, config) if separate_reference else None
        self._gradients = GradientGuard()
        self.version = 0
        self.row_records: list[RowRecord] = []
        """Log-probs and advantages of this rank's rows in the last update of a policy."""

    @property
    def engines(self) -> dict[str, RaylightEngine]:
        """The engines that are trained, by name."""
        return {"policy": self.engine}

    def progress(self) -> JsonObject:
        """Return the numbers, as opposed to tensors, that training changes."""
        return {"version": self.version, "non_finite": self._gradients.consecutive}

    def restore_progress(self, progress: JsonObject) -> None:
        """Continue from the numbers that `progress` returned."""
        self.version, self._gradients.consecutive = progress["version"], progress["non_finite"]

    def load_images(self, files: Mapping[str, bytes]) -> None:
        """Give the images of an update to all engines.

        Args:
            files: by digest.
        """
        for engine in filter(None, (*self.engines.values(), self._reference)):
            engine.load_images(files)

    def infer_reference(self, rows: list[TrainRow]) -> list[torch.Tensor]:
        """Return the initial model's log-probs of each row, shape (response tokens,)."""
        if self._reference is not None:
            return self._reference.infer(rows)
        with self.engine.disable_adapter():
            return self.engine.infer(rows)

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probs of `ids[1:]` at temperature 1, each given the tokens before it."""
        return self.engine.infer([make_probe_row(ids)])[0].tolist()

    def export(self) -> dict[str, np.ndarray] | None:
        """Return the full model as float32 arrays by Hugging Face name, its adapter merged; rank 0 only."""
        tensors = weights.gather_model(self.engine)
        return None if tensors is None else weights.copy_to_numpy(tensors)

    def export_adapter(self) -> tuple[JsonObject, dict[str, np.ndarray]] | None:
        """Return the adapter's peft configuration and float32 arrays by peft's names; rank 0 only."""
        adapter = weights.gather_adapter(self.engine)
        return None if adapter is None else (adapter[0], weights.copy_to_numpy(adapter[1]))
