"""The critic of one rank on verl's FSDP2 engine."""

from __future__ import annotations

from typing import Any

import torch

from raylight.config import LearnerConfig
from raylight.experience.settings import CriticSettings
from raylight.experience.unused_settings import SCALED_AGGREGATION
from raylight.learner import verl_api as verl
from raylight.learner.engines import build_critic, optimizer_config
from raylight.learner.faults import GradientGuard
from raylight.learner.losses import averages_rows, longest_response, mean_over_rollouts
from raylight.learner.metrics import CRITIC_NAMES, all_reduce_metrics, mean_over_steps, rename_metrics
from raylight.learner.response_logprobs import select_response_tokens
from raylight.learner.rows import Minibatch, TrainRow, to_tensordict


class Critic:
    """The value model of one rank.

    Every method is a collective that all ranks call with the same arguments. With `LearnerConfig.lora`, an
    adapter with the same settings and the full head are trained; otherwise the full model.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, settings: CriticSettings, total_steps: int
    ) -> None:
        self._config, self._settings = config, settings
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
        data = to_tensordict(rows, self._config, global_rollouts=len(rows), entropy=False)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)["model_output"]["values"]
        for row, values in zip(
            rows, verl.response_from_nested(output, data["response_mask"]).unbind(), strict=True
        ):
            row.values = values.float().cpu()

    def update(self, minibatches: list[Minibatch]) -> dict[str, float]:
        """Fit the values to the rows' `returns`, and return metrics.

        Raises:
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        steps = minibatches * self._settings.ppo_epochs
        metrics = mean_over_steps([self._step(minibatch) for minibatch in steps])
        metrics["critic/lr"] = float(self.engine.lr_scheduler_step())
        return metrics

    def _step(self, minibatch: Minibatch) -> dict[str, float]:
        """Take an optimizer step on one mini-batch."""
        rows, rollouts = minibatch
        data = to_tensordict(rows, self._config, global_rollouts=rollouts, entropy=False)
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=ValueLoss(self._settings, rows))
        metrics = all_reduce_metrics(output["metrics"])
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
        self._averages_rows = averages_rows(settings)
        self._config = verl.CriticConfig(
            strategy="fsdp2",
            use_dynamic_bsz=True,
            cliprange_value=settings.cliprange_value,
            loss_agg_mode=settings.loss_agg_mode,
            loss_scale_factor=(
                longest_response(rows) if settings.loss_agg_mode == SCALED_AGGREGATION else None
            ),
            optim=optimizer_config(settings, 1),
        )

    def __call__(
        self, model_output: dict[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch and verl's metrics."""
        loss, metrics = verl.value_loss(self._config, model_output, data, dp_group)
        if self._averages_rows:
            values = select_response_tokens(model_output["values"], data)
            old, returns = data["values"].values(), data["returns"].values()
            limit = self._config.cliprange_value
            clipped = values.clamp(old - limit, old + limit)
            errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
            loss = 0.5 * mean_over_rollouts(errors, data)
            metrics["critic/vf_loss"] = verl.Metric("sum", loss)
        return loss, metrics
