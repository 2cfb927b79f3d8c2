"""Updates from examples with known answers: supervised fine-tuning, preferences between two answers, and
reward models.

All losses are linear in the log-probs or scores of the answers once a weight is known for each token, so that
rows can be in any micro-batch and on any rank. Supervised fine-tuning has weights of 1. A pair's weights are
the derivatives of its loss, which a pass before the update computes, so that the gradient equals the loss's
own.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from raylight.config import LearnerConfig
from raylight.experience.batches.shards import BatchOutline, BatchShard
from raylight.experience.settings.supervised_settings import (
    PairSettings,
    PreferenceSettings,
    RankingSettings,
    SupervisedSettings,
)
from raylight.learner import verl_api as verl
from raylight.learner.losses.metrics import all_reduce_metrics
from raylight.learner.model.fsdp import LossFunction
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import Minibatch, TrainRow, build_minibatches, build_rows
from raylight.learner.updates.trained_model import TrainedModel


class SupervisedModel(TrainedModel):
    """The model of one rank, which learns answers."""

    def __init__(
        self,
        model_path: str,
        config: LearnerConfig,
        settings: SupervisedSettings,
        total_steps: int,
    ) -> None:
        super().__init__(model_path, config, settings, total_steps)
        self._settings = settings

    def update_shard(self, shard: BatchShard) -> dict[str, float]:
        """Take an optimizer step on this rank's shard of a batch, and return metrics, equal on all ranks.

        Raises:
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        minibatch = _minibatch(shard)
        loss, known = self._loss(minibatch.rows, shard.outline)
        found = all_reduce_metrics(self.engine.train(minibatch, loss))
        metrics = {"train/loss": found["loss"], "learner/grad_norm": found["grad_norm"]} | known
        if "router_aux_loss" in found:
            metrics["learner/router_aux_loss"] = found["router_aux_loss"]
        metrics |= self._gradients.check(found["grad_norm"])
        metrics["learner/lr"] = float(self.engine.lr_scheduler_step())
        self.version += 1
        return metrics

    def evaluate_shard(self, shard: BatchShard) -> dict[str, float]:
        """Return the sums of the loss and of other figures over a batch of all ranks, and their `count`."""
        rows = _minibatch(shard).rows
        if isinstance(self._settings, PairSettings):
            return pair_statistics(*self._pair_values(rows, shard.outline), self._settings)
        totals = torch.zeros(2, dtype=torch.float64)
        for row, logprobs in zip(rows, self.engine.infer(rows), strict=True):
            totals[0] -= (logprobs.double() * row.mask).sum()
            totals[1] += row.mask.sum()
        loss, count = self._sum(totals).tolist()
        return {"loss": loss, "count": count}

    def _loss(self, rows: list[TrainRow], outline: BatchOutline) -> tuple[LossFunction, dict[str, float]]:
        """Return the loss function of an update, and the metrics that are known before it."""
        settings = self._settings
        if not isinstance(settings, PairSettings):
            return answer_loss, {}
        values, facts = self._pair_values(rows, outline)
        values.requires_grad_()
        losses = pair_losses(values, facts, settings)
        (weights,) = torch.autograd.grad(losses.mean(), values)
        for row in rows:
            row.advantages = torch.full(row.mask.shape, -float(weights[row.rollout]))
        known = pair_statistics(values.detach(), facts, settings)
        pairs = known.pop("count")
        return weighted_loss, {f"train/{name}": total / pairs for name, total in known.items()}

    def _pair_values(self, rows: list[TrainRow], outline: BatchOutline) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `pair_losses` reads of each answer of the batch: the log ratio of its probability to
        the initial model's and the number of its tokens, or its score and its margin; shapes (answers,)."""
        if isinstance(self._settings, RankingSettings):
            scores = torch.zeros(len(outline.rewards), dtype=torch.float64)
            for row, values in zip(rows, self.engine.infer(rows), strict=True):
                scores[row.rollout] += (values.double() * row.mask).sum()
            return self._sum(scores), torch.tensor(outline.rewards, dtype=torch.float64)
        totals = torch.zeros(2, len(outline.rewards), dtype=torch.float64)
        for row, own, initial in zip(rows, self.engine.infer(rows), self.infer_reference(rows), strict=True):
            totals[0, row.rollout] += ((own - initial).double() * row.mask).sum()
            totals[1, row.rollout] += row.mask.sum()
        ratios, tokens = self._sum(totals)
        return ratios, tokens

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks that have different rows."""
        values = values.to(self.engine.collective_device)
        torch.distributed.all_reduce(values, group=self.engine.get_data_parallel_group())
        return values.cpu()


def answer_loss(
    outputs: dict[str, torch.Tensor], batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, verl.Metric]]:
    """Return a micro-batch's part of the mean negative log-prob of all learned tokens, shape ()."""
    loss = -outputs["log_probs"].where(batch.mask, 0.0).sum() * (batch.dp_size / batch.tokens)
    return loss, {"loss": verl.Metric("sum", loss)}


def weighted_loss(
    outputs: dict[str, torch.Tensor], batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, verl.Metric]]:
    """Return the sum of the log-probs, or of a reward model's scores, times the negative weights of their
    tokens, shape ()."""
    weighted = -batch.matrix("advantages") * outputs["log_probs" if "log_probs" in outputs else "values"]
    loss = weighted.where(batch.mask, 0.0).sum() * batch.dp_size
    return loss, {"loss": verl.Metric("sum", loss)}


def _minibatch(shard: BatchShard) -> Minibatch:
    (minibatch,) = build_minibatches(build_rows(shard.rows, shard.outline.owners.tolist()), shard.minibatches)
    return minibatch


def pair_losses(values: torch.Tensor, facts: torch.Tensor, settings: PairSettings) -> torch.Tensor:
    """Return the loss of each pair, shape (pairs,).

    Args:
        values: of each answer, shape (2 pairs,), the chosen answer of each pair before the rejected one: the
            log ratio of its probability to the initial model's, or the score of a reward model.
        facts: the number of tokens of each answer; for a reward model the margin of each chosen answer, and 0
            for the others. Same shape.
    """
    if isinstance(settings, RankingSettings):
        losses = -logsigmoid(_margin(values) - facts[0::2])
        return losses + settings.center_rewards_coefficient * (values[0::2] + values[1::2]) ** 2
    assert isinstance(settings, PreferenceSettings)
    return _preference_losses(values, facts, settings)


def _preference_losses(
    ratios: torch.Tensor, tokens: torch.Tensor, settings: PreferenceSettings
) -> torch.Tensor:
    margin = _margin(ratios)
    beta, smoothing = settings.beta, settings.label_smoothing
    if settings.loss_type == "hinge":
        return torch.relu(1 - beta * margin)
    if settings.loss_type == "ipo":
        return (_margin(ratios / tokens.clamp(min=1)) - 1 / (2 * beta)) ** 2
    right, wrong = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
    if settings.loss_type == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def pair_statistics(values: torch.Tensor, facts: torch.Tensor, settings: PairSettings) -> dict[str, float]:
    """Return sums over the pairs, and their `count`: the loss, the rewards of both answers (the score, or
    beta times the log ratio), their margin, and the pairs whose chosen answer has the higher reward.

    Args:
        values, facts: as for `pair_losses`, shapes included.
    """
    scale = settings.beta if isinstance(settings, PreferenceSettings) else 1.0
    chosen, rejected = scale * values[0::2], scale * values[1::2]
    return {
        "loss": float(pair_losses(values, facts, settings).sum()),
        "accuracy": float((chosen > rejected).sum()),
        "margin": float((chosen - rejected).sum()),
        "chosen_reward": float(chosen.sum()),
        "rejected_reward": float(rejected.sum()),
        "count": float(len(chosen)),
    }


def _margin(values: torch.Tensor) -> torch.Tensor:
    return values[0::2] - values[1::2]
