"""The policy on verl's FSDP2 engine, with its frozen reference and its critic: log-probs, one update, export, save. One object per
rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raylight.config import LearnerConfig
from raylight.experience.batch import TrainBatch
from raylight.experience.settings import PolicySettings
from raylight.learner import correction, weights
from raylight.learner import verl_api as verl
from raylight.learner.advantages import KlController, add_advantages
from raylight.learner.critic import Critic
from raylight.learner.engines import build_policy, build_reference
from raylight.learner.grad_guard import GradientWatch
from raylight.learner.losses import PolicyLoss
from raylight.learner.metrics import all_reduce_metrics, mean_over_steps, rename_metrics
from raylight.learner.rows import (
    TrainRow,
    probe_row,
    rows_of,
    shard_for_rank,
    split_minibatches,
    to_tensordict,
)


class Policy:
    """The trained model of one rank; every method is a collective that all ranks call alike.

    Args:
        model_path: folder of a Hugging Face model.
        total_steps: updates of the whole run, for the learning-rate schedule.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, settings: PolicySettings, total_steps: int
    ) -> None:
        self._config = config
        self._settings = settings
        warmup = settings.critic.warmup_steps if settings.critic else 0
        self.engine = build_policy(model_path, config, settings, max(total_steps - warmup, 1))
        own_reference = (
            settings.needs_reference and config.lora is None
        )  # with LoRA it is the policy without its adapter
        self._reference = build_reference(model_path, config) if own_reference else None
        self.critic = Critic(model_path, config, settings.critic, total_steps) if settings.critic else None
        self._kl = KlController(settings)
        self._gradients = GradientWatch()
        self._drops_out = config.lora is not None and config.lora.dropout > 0
        self.version = 0

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update with a batch that is the same on all ranks; returns metrics, the same on all ranks.

        Raises:
            MismatchError: the engine's log-probs of the current version differ from this model's.
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        settings = self._settings
        rows = rows_of(batch)
        parts = split_minibatches(rows, settings.mini_batches)
        shares = [self._share(part) for part in parts]
        mine = [row for share in shares for row in share]
        trains = self.critic is None or not self.critic.warms_up
        # a pass that drops out would not tell what the policy says, and none tells it where the critic warms up
        infers = settings.needs_old_logprobs or self._drops_out or not trains
        self._look_back(mine, infers)
        metrics: dict[str, float] = {}
        if infers:
            metrics |= correction.measure(mine, self.version, settings)
        metrics |= add_advantages(batch, rows, mine, settings, self._kl)
        if self.critic is not None:
            metrics |= self.critic.update(rows)
        if settings.correction_enabled:  # only now: what is left out of the loss still is a sample to compare with, and to learn values from
            metrics |= correction.correct(mine, settings)
        if trains:
            metrics |= self._train(parts, shares)
        if not infers:
            metrics |= correction.measure(
                shares[0], self.version, settings
            )  # that were seen before the first step
        scheduler = self.engine.lr_scheduler  # while the policy rests, so does its schedule
        metrics["learner/lr"] = float(
            self.engine.lr_scheduler_step() if trains else scheduler.get_last_lr()[0]
        )
        self.version += 1
        return metrics

    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of `ids[1:]`, each given those before it; `ids` are the same on all ranks."""
        return self._infer(self.engine, [probe_row(ids)])[0].tolist()

    def export(self) -> dict[str, np.ndarray] | None:
        """The whole model, an adapter merged into it, as float32 arrays by Hugging Face name, on rank 0; None elsewhere."""
        tensors = weights.whole_model(self.engine)
        return None if tensors is None else weights.as_arrays(tensors)

    def export_adapter(self) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """With LoRA, on rank 0: the adapter's peft configuration and its float32 arrays by peft's names; None elsewhere."""
        adapter = weights.adapter_alone(self.engine)
        return None if adapter is None else (adapter[0], weights.as_arrays(adapter[1]))

    def save(self, folder: str) -> None:
        """Write the model in Hugging Face format to `folder`, complete or not at all.

        With LoRA the adapter is merged into it, and also is in the folder `adapter` of it in peft's format.
        """
        weights.save_model(self.engine, folder)

    def _share(self, rows: list[TrainRow]) -> list[TrainRow]:
        return shard_for_rank(
            rows, self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        )

    def _look_back(self, mine: list[TrainRow], infers: bool) -> None:
        """What the policy (if it `infers`), its reference and the critic say of the rows, before anything changes."""
        settings = self._settings
        if settings.bypass_mode:
            for row in mine:
                row.old_logprobs = row.engine_logprobs
        if infers:
            self._set(
                mine,
                "seen_logprobs" if settings.bypass_mode else "old_logprobs",
                self._infer(self.engine, mine),
            )
        if settings.needs_reference:
            self._set(mine, "ref_logprobs", self._infer_reference(mine))
        if self.critic is not None:
            self.critic.add_values(mine)

    def _set(self, rows: list[TrainRow], name: str, values: list[torch.Tensor]) -> None:
        for row, value in zip(rows, values, strict=True):
            setattr(row, name, value)

    def _infer_reference(self, rows: list[TrainRow]) -> list[torch.Tensor]:
        if self._reference is not None:
            return self._infer(self._reference, rows)
        with self.engine.disable_adapter():
            return self._infer(self.engine, rows)

    def _infer(self, engine: Any, rows: list[TrainRow]) -> list[torch.Tensor]:
        """Log-probs of each row's response."""
        data = to_tensordict(rows, self._config, global_rollouts=len(rows), entropy=False)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]["log_probs"]
        return [
            logprobs.float().cpu()
            for logprobs in verl.response_from_nested(output, data["response_mask"]).unbind()
        ]

    def _train(self, parts: list[list[TrainRow]], shares: list[list[TrainRow]]) -> dict[str, float]:
        """All optimizer steps over a batch; all mini-batches are compared with the same old policy."""
        steps = list(zip(parts, shares, strict=True))
        if self._settings.rollout_rs is not None:
            steps = [step for step in steps if correction.any_left(step[1])]
        steps *= self._settings.ppo_epochs
        return mean_over_steps(
            [self._step(share, len({row.rollout for row in part})) for part, share in steps]
        )

    def _step(self, mine: list[TrainRow], rollouts: int) -> dict[str, float]:
        """Gradient and optimizer step over one mini-batch."""
        settings = self._settings
        entropy = settings.calculate_entropy or settings.entropy_coef != 0
        data = to_tensordict(mine, self._config, global_rollouts=rollouts, entropy=entropy)
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=PolicyLoss(settings, mine))
        metrics = all_reduce_metrics(output["metrics"])
        return rename_metrics(metrics) | self._gradients.seen(metrics["grad_norm"])
