"""The policy on verl's FSDP2 engine, with its frozen reference and its critic: log-probs, one update, export, save. One object per
rank."""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import torch

from raylight.config import LearnerConfig
from raylight.learner import correction
from raylight.learner import verl_api as verl
from raylight.learner.advantages import KlController, add_advantages
from raylight.learner.batch import TrainBatch
from raylight.learner.critic import Critic
from raylight.learner.engines import build_policy, build_reference
from raylight.learner.losses import PolicyLoss
from raylight.learner.metrics import mean_of, named, over_ranks
from raylight.learner.rows import Row, deal, probe_row, rows_of, share_of_rank, to_tensordict
from raylight.learner.settings import PolicySettings
from raylight.learner.steps import GradientWatch


class Policy:
    """The trained model of one rank; every method is a collective that all ranks call alike.

    Args:
        model_path: folder of a Hugging Face model.
        total_steps: updates of the whole run, for the learning-rate schedule.
    """

    def __init__(self, model_path: str, config: LearnerConfig, settings: PolicySettings, total_steps: int) -> None:
        self._config = config
        self._settings = settings
        self.engine = build_policy(model_path, config, settings, total_steps)
        own_reference = settings.needs_reference and config.lora is None  # with LoRA it is the policy without its adapter
        self._reference = build_reference(model_path, config) if own_reference else None
        self.critic = Critic(model_path, config, settings.critic, total_steps) if settings.critic else None
        self._kl = KlController(settings)
        self._gradients = GradientWatch()
        self.version = 0

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update with a batch that is the same on all ranks; returns metrics, the same on all ranks.

        Raises:
            MismatchError: the engine's log-probs of the current version differ from this model's.
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        settings = self._settings
        rows = rows_of(batch)
        parts = deal(rows, settings.mini_batches)
        shares = [self._share(part) for part in parts]
        mine = [row for share in shares for row in share]
        self._look_back(mine)
        metrics: dict[str, float] = {}
        if settings.needs_old_logprobs:
            metrics |= correction.measure(mine, self.version, settings)
        if settings.corrects:
            metrics |= correction.correct(mine, settings)
        metrics |= add_advantages(batch, rows, mine, settings, self._kl)
        if self.critic is not None:
            metrics |= self.critic.update(rows)
        if not settings.critic or self.version >= settings.critic.warmup_steps:
            metrics |= self._train(parts, shares)
        if not settings.needs_old_logprobs:
            metrics |= correction.measure(mine, self.version, settings)
        metrics["learner/lr"] = float(self.engine.lr_scheduler_step())
        self.version += 1
        return metrics

    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of `ids[1:]`, each given those before it; `ids` are the same on all ranks."""
        return self._infer(self.engine, [probe_row(ids)])[0].tolist()

    def export(self) -> dict[str, np.ndarray] | None:
        """The whole model as float32 arrays by Hugging Face name, on rank 0; None elsewhere."""
        params, _ = self.engine.get_per_tensor_param()
        arrays = {}
        for name, tensor in params:
            if torch.distributed.get_rank() == 0:
                arrays[name] = tensor.detach().to("cpu", torch.float32).numpy().copy()
        return arrays or None

    def save(self, folder: str) -> None:
        """Write the model in Hugging Face format to `folder`, complete or not at all."""
        partial = f"{folder}.partial"
        self.engine.save_checkpoint(partial, global_step=self.version)
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(os.path.join(partial, "huggingface"), folder)
            shutil.rmtree(partial)
        torch.distributed.barrier()

    def _share(self, rows: list[Row]) -> list[Row]:
        return share_of_rank(rows, self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size())

    def _look_back(self, mine: list[Row]) -> None:
        """What the policy, its reference and the critic say of the rows, before anything changes."""
        settings = self._settings
        if settings.bypass_mode:
            for row in mine:
                row.old_logprobs = row.engine_logprobs
        elif settings.needs_old_logprobs:
            self._set(mine, "old_logprobs", self._infer(self.engine, mine))
        if settings.needs_reference:
            self._set(mine, "ref_logprobs", self._infer_reference(mine))
        if self.critic is not None:
            self.critic.add_values(mine)

    def _set(self, rows: list[Row], name: str, values: list[torch.Tensor]) -> None:
        for row, value in zip(rows, values, strict=True):
            setattr(row, name, value)

    def _infer_reference(self, rows: list[Row]) -> list[torch.Tensor]:
        if self._reference is not None:
            return self._infer(self._reference, rows)
        with self.engine.disable_adapter():
            return self._infer(self.engine, rows)

    def _infer(self, engine: Any, rows: list[Row]) -> list[torch.Tensor]:
        """Log-probs of each row's response."""
        data = to_tensordict(rows, self._config, global_rollouts=len(rows), entropy=False)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]["log_probs"]
        return [logprobs.float().cpu() for logprobs in verl.response_from_nested(output, data["response_mask"]).unbind()]

    def _train(self, parts: list[list[Row]], shares: list[list[Row]]) -> dict[str, float]:
        """All optimizer steps over a batch; all mini-batches are compared with the same old policy."""
        steps = list(zip(parts, shares, strict=True)) * self._settings.ppo_epochs
        return mean_of([self._step(share, len({row.rollout for row in part})) for part, share in steps])

    def _step(self, mine: list[Row], rollouts: int) -> dict[str, float]:
        """Gradient and optimizer step over one mini-batch."""
        settings = self._settings
        entropy = settings.calculate_entropy or settings.entropy_coef != 0
        data = to_tensordict(mine, self._config, global_rollouts=rollouts, entropy=entropy)
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=PolicyLoss(settings, mine))
        metrics = over_ranks(output["metrics"])
        return named(metrics) | self._gradients.seen(metrics["grad_norm"])
