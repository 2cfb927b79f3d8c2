"""Advantages of rollouts, computed by verl's estimators or the user's.

Law: statistics are over rollouts, never over rows, so that a rollout of several rows counts once.

An estimator receives a rollout as one sequence: all its sampled tokens, row after row. The reward is on the
last token; a turn reward is on the last token of the call before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raylight.errors import ConfigError
from raylight.experience.batch import TrainBatch
from raylight.experience.registry import select_arguments
from raylight.experience.settings import PolicySettings
from raylight.learner import verl_api as verl
from raylight.learner.rows import TrainRow

ROW_MEAN_LOSSES = ("sapo", "geo_mean")
"""Losses that average over the tokens of each row, whatever `loss_agg_mode` is."""
EXACT_EQUIVALENTS = {"grpo_vectorized": "grpo"}
"""verl's estimators that compute in float32 -> equivalent ones that compute in the dtype of the rewards."""
WHITENING_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that whiten over tokens. verl raises if there is only one token."""


class KlController:
    """Coefficient of the KL penalty in the reward: fixed, or adaptive (https://arxiv.org/abs/1909.08593)."""

    def __init__(self, settings: PolicySettings) -> None:
        self._adaptive = settings.kl_target is not None
        self._controller = (
            verl.FixedKLController(settings.kl_reward_coef)
            if settings.kl_target is None
            else verl.AdaptiveKLController(settings.kl_reward_coef, settings.kl_target, settings.kl_horizon)
        )

    @property
    def coef(self) -> float:
        """Current coefficient."""
        return float(self._controller.value)

    @property
    def adapted_coef(self) -> float | None:
        """Current coefficient of an adaptive controller, for `restore`; None if the settings fix it."""
        return self.coef if self._adaptive else None

    def restore(self, adapted_coef: float | None) -> None:
        """Continue from an earlier coefficient. A coefficient that the settings fix is kept."""
        if self._adaptive and adapted_coef is not None:
            self._controller.value = adapted_coef

    def update(self, kl: float, rollouts: int) -> None:
        """Adapt the coefficient to the mean KL of a batch."""
        self._controller.update(current_kl=kl, n_steps=rollouts)


class RolloutSequences:
    """Rollouts as sequences of their sampled tokens, in matrices of shape (rollouts, longest rollout).

    Args:
        rows: all rows of the batch.
        rollouts: number of rollouts, including those without rows.
    """

    def __init__(self, rows: list[TrainRow], rollouts: int) -> None:
        self._rows: list[list[TrainRow]] = [[] for _ in range(rollouts)]
        for row in rows:
            self._rows[row.rollout].append(row)
        self._sampled = {row.index: torch.nonzero(row.mask == 1)[:, 0] for row in rows}
        self.lengths = torch.tensor(
            [sum(len(self._sampled[row.index]) for row in own_rows) for own_rows in self._rows]
        )
        width = max(int(self.lengths.max()), 1)
        self.mask = (torch.arange(width) < self.lengths[:, None]).float()

    def concatenate(self, field: str) -> torch.Tensor:
        """Concatenate a field of each rollout's rows; entries after a rollout's end are 0."""
        matrix = torch.zeros_like(self.mask)
        for rollout, own_rows in enumerate(self._rows):
            parts = [getattr(row, field)[self._sampled[row.index]] for row in own_rows]
            if parts:
                matrix[rollout, : self.lengths[rollout]] = torch.cat(parts)
        return matrix

    def split_by_row(self, matrix: torch.Tensor) -> dict[int, torch.Tensor]:
        """Split a matrix by row index, with an entry per response token, 0 if it was not sampled."""
        by_row = {}
        for rollout, own_rows in enumerate(self._rows):
            start = 0
            for row in own_rows:
                sampled = self._sampled[row.index]
                by_row[row.index] = torch.zeros(len(row.response))
                by_row[row.index][sampled] = matrix[rollout, start : start + len(sampled)].float()
                start += len(sampled)
        return by_row

    def rewards(self, batch: TrainBatch) -> torch.Tensor:
        """Return the batch's rewards, each on its token.

        The reward of a truncated call, or of one whose last tokens were forced, is on the last trained token
        before; without one, on the rollout's first.

        The dtype is float64: in float32 the mean of equal rewards may differ from them by a rounding error,
        as may their deviation, and the quotient of the two would be an advantage without a cause.
        """
        rewards = torch.zeros_like(self.mask, dtype=torch.float64)
        last = (self.lengths - 1).clamp(min=0)
        rewards[torch.arange(len(last)), last] = torch.tensor(batch.rewards, dtype=torch.float64)
        for turn in batch.turn_rewards:
            position = (
                int(last[turn.rollout])
                if turn.row is None
                else self._position(turn.rollout, turn.row, turn.token)
            )
            rewards[turn.rollout, position] += turn.value
        return rewards

    def row_fractions(self) -> dict[int, float]:
        """Return, by row index, the fraction of its rollout's sampled tokens that a row has."""
        lengths = self.lengths.clamp(min=1).tolist()
        return {
            row.index: len(self._sampled[row.index]) / lengths[row.rollout]
            for own_rows in self._rows
            for row in own_rows
        }

    def _position(self, rollout: int, index: int, token: int) -> int:
        """Return the position in the rollout's sequence of the last sampled token up to `token` of a row."""
        start = 0
        for row in self._rows[rollout]:
            if row.index == index:
                count = int((self._sampled[index] <= token - len(row.prompt)).sum())
                return max(start + count - 1, 0)
            start += len(self._sampled[row.index])
        raise AssertionError(f"row {index} does not belong to rollout {rollout}")


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator by row index, with one entry per response token."""

    advantages: dict[int, torch.Tensor]
    returns: dict[int, torch.Tensor]
    rollout_fractions: dict[int, float]
    metrics: dict[str, float]


def add_advantages(
    batch: TrainBatch,
    rows: list[TrainRow],
    own_rows: list[TrainRow],
    settings: PolicySettings,
    kl: KlController,
) -> dict[str, float]:
    """Set the rows' advantages, returns and rollout fractions; return metrics, equal on all ranks. A
    collective.

    Args:
        rows: all rows of the batch; fields computed by other ranks are filled in where the estimator needs
            them.
        own_rows: this rank's rows with their computed fields; some may be copies with an empty mask.
    """
    fields = ["old_logprobs", "ref_logprobs"] if settings.kl_reward_coef else []
    fields += ["values"] if settings.critic else []
    if fields:
        _all_gather_fields(rows, own_rows, fields)
    result = estimate(batch, rows, settings, kl)
    for row in [*rows, *own_rows]:
        row.advantages, row.returns = result.advantages[row.index], result.returns[row.index]
        row.rollout_fraction = result.rollout_fractions[row.index]
    return result.metrics


def estimate(batch: TrainBatch, rows: list[TrainRow], settings: PolicySettings, kl: KlController) -> Estimate:
    """Compute advantages and returns of all rows from their fields.

    Raises:
        ConfigError: a user's estimator returned something of another shape, or a value that is not finite.
    """
    sequences = RolloutSequences(rows, len(batch.rewards))
    rewards, metrics = sequences.rewards(batch), {}
    if settings.kl_reward_coef:
        old: Any = sequences.concatenate("old_logprobs")
        reference: Any = sequences.concatenate("ref_logprobs")
        token_kl: torch.Tensor = verl.kl_penalty(old, reference, settings.kl_reward_type) * sequences.mask
        rewards = rewards - kl.coef * token_kl
        mean = float((token_kl.sum(-1) / sequences.lengths.clamp(min=1)).mean())
        metrics = {"learner/kl_in_reward": mean, "learner/kl_reward_coef": kl.coef}
        kl.update(mean, len(batch.rewards))
    advantages, returns = _run_estimator(rewards, sequences, batch, settings)
    metrics["learner/advantage_abs_mean"] = float(
        (advantages.abs() * sequences.mask).sum() / sequences.mask.sum().clamp(min=1)
    )
    by_row, fractions = sequences.split_by_row(advantages), sequences.row_fractions()
    if settings.loss_agg_mode == "seq-mean-token-mean" or settings.loss_mode in ROW_MEAN_LOSSES:
        # the loss adds row means and divides by rollouts; weighting rows by length makes a rollout count once
        by_row = {index: by_row[index] * fraction for index, fraction in fractions.items()}
    return Estimate(by_row, sequences.split_by_row(returns), fractions, metrics)


def _run_estimator(
    rewards: torch.Tensor, sequences: RolloutSequences, batch: TrainBatch, settings: PolicySettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the estimator with the arguments it has parameters for; return advantages and returns."""
    name, user_function = settings.adv_estimator, settings.user_estimator
    function = user_function or verl.get_adv_estimator_fn(EXACT_EQUIVALENTS.get(name, name))
    arguments: dict[str, Any] = {
        "token_level_rewards": rewards.float() if user_function else rewards,
        "response_mask": sequences.mask,
        "index": np.array(batch.groups, dtype=object),
        "gamma": settings.gamma,
        "lam": settings.lam,
        "norm_adv_by_std_in_grpo": settings.norm_adv_by_std,
        "config": verl.AlgoConfig(
            gamma=settings.gamma, lam=settings.lam, norm_adv_by_std_in_grpo=settings.norm_adv_by_std
        ),
    }
    if settings.critic is not None:
        arguments["values"] = sequences.concatenate("values")
    if batch.baselines is not None:
        arguments["reward_baselines"] = torch.tensor(batch.baselines, dtype=torch.float64)
    # verl cannot whiten a single token; two copies of it have the same mean
    single_token = name in WHITENING_ESTIMATORS and sequences.mask.sum() == 1
    result = function(**select_arguments(function, _duplicate(arguments) if single_token else arguments))
    advantages, returns = result if isinstance(result, tuple) else (result, result)
    if single_token:
        advantages, returns = advantages[: len(rewards)], returns[: len(rewards)]
    _check_result(name, "advantages", advantages, sequences)
    _check_result(name, "returns", returns, sequences)
    return advantages.float(), returns.float()


def _duplicate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with every rollout twice."""
    return {
        name: torch.cat([value, value])
        if isinstance(value, torch.Tensor)
        else np.concatenate([value, value])
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }


def _check_result(name: str, kind: str, matrix: Any, sequences: RolloutSequences) -> None:
    """Raise ConfigError unless the estimator returned a finite number for every sampled token."""
    expected = tuple(sequences.mask.shape)
    if not isinstance(matrix, torch.Tensor) or matrix.shape != expected:
        raise ConfigError(
            f"advantage estimator {name!r} returned {kind} of shape {tuple(getattr(matrix, 'shape', ()))}; "
            f"return the shape of token_level_rewards, {expected}"
        )
    invalid = ~matrix[sequences.mask == 1].float().isfinite()
    if invalid.any():
        raise ConfigError(
            f"advantage estimator {name!r} returned {kind} that are not finite for {int(invalid.sum())} of "
            f"{len(invalid)} sampled tokens: a reward is out of range, or the estimator divides by a "
            "deviation of 0 (add a small number to it)"
        )


def _all_gather_fields(rows: list[TrainRow], own_rows: list[TrainRow], fields: list[str]) -> None:
    """Set fields of all rows to the values that their ranks computed. A collective."""
    own = {row.index: {field: getattr(row, field).numpy() for field in fields} for row in own_rows}
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own)
    values = {index: row_values for rank in ranks for index, row_values in rank.items()}
    for row in rows:
        for field in fields:
            setattr(row, field, torch.from_numpy(values[row.index][field]))
