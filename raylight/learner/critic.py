"""The critic on verl's FSDP2 engine: values, and one update. One object per rank."""

from __future__ import annotations

import functools
from typing import Any

import torch

from raylight.config import LearnerConfig
from raylight.experience.settings import CriticSettings
from raylight.learner import verl_api as verl
from raylight.learner.engines import build_critic, optimizer_config
from raylight.learner.grad_guard import GradientWatch
from raylight.learner.metrics import CRITIC_NAMES, all_reduce_metrics, mean_over_steps, rename_metrics
from raylight.learner.rows import TrainRow, shard_for_rank, split_minibatches, to_tensordict


class Critic:
    """The value model of one rank; every method is a collective that all ranks call alike.

    With `LearnerConfig.lora` an adapter of the same settings is trained, and the head in full; else the whole model.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, settings: CriticSettings, total_steps: int
    ) -> None:
        self._config, self._settings = config, settings
        self.engine = build_critic(settings.model or model_path, config, settings, total_steps)
        self._loss = functools.partial(verl.value_loss, critic_config(settings))
        self._gradients = GradientWatch()

    @property
    def warms_up(self) -> bool:
        """Whether the policy rests in this update."""
        return self.engine.lr_scheduler.last_epoch < self._settings.warmup_steps

    def add_values(self, rows: list[TrainRow]) -> None:
        """Set each row's `values`: one for each token of its response, of what was there before it."""
        data = to_tensordict(rows, self._config, global_rollouts=len(rows), entropy=False)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)["model_output"]["values"]
        for row, values in zip(
            rows, verl.response_from_nested(output, data["response_mask"]).unbind(), strict=True
        ):
            row.values = values.float().cpu()

    def update(self, rows: list[TrainRow]) -> dict[str, float]:
        """Fit the values to the rows' `returns`; `rows` are all of the batch, the same on all ranks. Returns metrics.

        Raises:
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        before = explained_variance(rows)
        parts = split_minibatches(rows, self._settings.mini_batches) * self._settings.ppo_epochs
        metrics = mean_over_steps([self._step(part) for part in parts])
        metrics["critic/lr"] = float(self.engine.lr_scheduler_step())
        return metrics | {"critic/explained_variance": before}

    def _step(self, part: list[TrainRow]) -> dict[str, float]:
        """Gradient and optimizer step over one mini-batch."""
        mine = shard_for_rank(
            part, self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        )
        rollouts = len({row.rollout for row in part})
        data = to_tensordict(mine, self._config, global_rollouts=rollouts, entropy=False)
        with self.engine.train_mode():
            output = self.engine.train_batch(data, loss_function=self._loss)
        metrics = all_reduce_metrics(output["metrics"])
        skipped = self._gradients.seen(metrics["grad_norm"])["learner/skipped_steps"]
        return rename_metrics(metrics, CRITIC_NAMES) | {"critic/skipped_steps": skipped}


def explained_variance(rows: list[TrainRow]) -> float:
    """How much of the variance of the sampled tokens' returns the values told: 1 is all of it, 0 as much as their mean would.

    It is 0 too where the returns are all equal.
    """
    pairs: list[tuple[Any, Any]] = [(row.values, row.returns) for row in rows]
    values, returns = (
        torch.cat([pair[i][row.mask == 1] for pair, row in zip(pairs, rows, strict=True)]) for i in (0, 1)
    )
    variance = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 1e-12 else 0.0


def critic_config(settings: CriticSettings) -> Any:
    """verl's words for the settings of the loss."""
    return verl.CriticConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        cliprange_value=settings.cliprange_value,
        loss_agg_mode=settings.loss_agg_mode,
        optim=optimizer_config(settings, 1),
    )
