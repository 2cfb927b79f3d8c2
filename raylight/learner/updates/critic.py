"""Value model (critic) of one rank, trained with verl's FSDP2 engine."""

from __future__ import annotations

import torch

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import SCALED_AGGREGATION, CriticSettings
from raylight.learner import verl_api as verl
from raylight.learner.faults import GradientGuard
from raylight.learner.losses.metrics import (
    CRITIC_NAMES,
    all_reduce_metrics,
    mean_over_steps,
    mean_over_tokens,
    rename_metrics,
)
from raylight.learner.losses.policy_loss import longest_response, mean_over_rollouts
from raylight.learner.model.verl_engines import build_critic
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import Minibatch, TrainRow


class Critic:
    """The value model of one rank.

    Every method is a collective that all ranks call with the same arguments. With `LearnerConfig.lora`, an
    adapter with the same settings and the full head are trained; otherwise the full model.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, settings: CriticSettings, total_steps: int
    ) -> None:
        self._settings = settings
        self.engine = build_critic(settings.model or model_path, config, settings, total_steps)
        self._gradients = GradientGuard()

    @property
    def warming_up(self) -> bool:
        """True if the next update trains only the critic."""
        return self.engine.lr_scheduler.last_epoch < self._settings.warmup_steps

    def add_values(self, rows: list[TrainRow]) -> None:
        """Set each row's `values`: for each response token, the value of the context before it.

        Args:
            rows: this rank's.
        """
        for row, values in zip(rows, self.engine.infer(rows), strict=True):
            row.values = values

    def update(self, minibatches: list[Minibatch]) -> dict[str, float]:
        """Fit the values to the rows' `returns`, and return metrics.

        Raises:
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        steps = minibatches * self._settings.ppo_epochs
        with self.engine.resident():
            metrics = mean_over_steps([self._step(minibatch) for minibatch in steps])
        metrics["critic/lr"] = float(self.engine.lr_scheduler_step())
        return metrics

    def _step(self, minibatch: Minibatch) -> dict[str, float]:
        """Take an optimizer step on one mini-batch."""
        metrics = all_reduce_metrics(self.engine.train(minibatch, ValueLoss(self._settings, minibatch.rows)))
        skipped = self._gradients.check(metrics["grad_norm"])["learner/skipped_steps"]
        return rename_metrics(metrics, CRITIC_NAMES) | {"critic/skipped_steps": skipped}


class ValueLoss:
    """Loss function that the engine calls with each micro-batch.

    As in `PolicyLoss`, a mean over rows counts a rollout once, and the divisor of seq-mean-token-sum-norm is
    the longest response of the mini-batch. verl would count each row of a rollout, and divide by the width of
    the micro-batch.

    Constructing it is a collective.

    Args:
        rows: this rank's rows of the mini-batch.
    """

    def __init__(self, settings: CriticSettings, rows: list[TrainRow]) -> None:
        self._settings = settings
        scaled = settings.loss_agg_mode == SCALED_AGGREGATION
        self._scale_factor = longest_response(rows) if scaled else None

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, verl.Metric]]:
        values, limit = outputs["values"], self._settings.cliprange_value
        old, returns = batch.matrix("values"), batch.matrix("returns")
        loss, clipped_fraction = verl.compute_value_loss(
            vpreds=values,
            values=old,
            returns=returns,
            response_mask=batch.mask,
            cliprange_value=limit,
            loss_agg_mode=self._settings.loss_agg_mode,
            dp_size=batch.dp_size,
            batch_num_tokens=batch.tokens,
            global_batch_size=batch.rollouts,
            loss_scale_factor=self._scale_factor,
        )
        if self._settings.loss_agg_mode == "seq-mean-token-mean":
            clipped = values.clamp(old - limit, old + limit)
            errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
            loss = 0.5 * mean_over_rollouts(errors, batch)
        return loss, {
            "critic/vf_loss": verl.Metric("sum", loss),
            "critic/vf_clipfrac": mean_over_tokens(clipped_fraction, batch),
            "critic/vpred_mean": mean_over_tokens(verl.masked_mean(values.detach(), batch.mask), batch),
        }
