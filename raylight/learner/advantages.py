"""Advantages of rollouts, by verl's estimators or the user's. Statistics are over rollouts, never over rows, so that a rollout of
several rows counts once.

A rollout stands before an estimator as one sequence: all its sampled tokens, row after row. Its reward is on the last of them;
rewards of turns are on the last token of the call they followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raylight.errors import ConfigError
from raylight.learner import verl_api as verl
from raylight.learner.batch import TrainBatch
from raylight.learner.custom import taken
from raylight.learner.rows import Row
from raylight.learner.settings import PolicySettings

MEANS_OF_ROWS = ("sapo", "geo_mean")
"""Losses that take the mean of each row whatever `loss_agg_mode` says."""


class KlController:
    """The weight of the KL divergence in the reward: fixed, or steered towards a target (https://arxiv.org/abs/1909.08593)."""

    def __init__(self, settings: PolicySettings) -> None:
        self._controller = (
            verl.FixedKLController(settings.kl_reward_coef)
            if settings.kl_target is None
            else verl.AdaptiveKLController(settings.kl_reward_coef, settings.kl_target, settings.kl_horizon)
        )

    @property
    def coef(self) -> float:
        return float(self._controller.value)

    @coef.setter
    def coef(self, coef: float) -> None:
        self._controller.value = coef

    def update(self, divergence: float, rollouts: int) -> None:
        """Take note of a batch's mean divergence."""
        self._controller.update(current_kl=divergence, n_steps=rollouts)


class Sequences:
    """Rollouts as sequences of their sampled tokens: matrices of shape (rollouts, tokens of the longest).

    Args:
        rows: of the batch, all of them.
    """

    def __init__(self, rows: list[Row], rollouts: int) -> None:
        self._rows_of: list[list[Row]] = [[] for _ in range(rollouts)]
        for row in rows:
            self._rows_of[row.rollout].append(row)
        self._sampled = {row.index: torch.nonzero(row.mask == 1)[:, 0] for row in rows}
        self.lengths = torch.tensor([sum(len(self._sampled[row.index]) for row in of_one) for of_one in self._rows_of])
        width = max(int(self.lengths.max()), 1)
        self.mask = (torch.arange(width) < self.lengths[:, None]).float()

    def joined(self, name: str) -> torch.Tensor:
        """A field of the rows, 0 past a rollout's end."""
        found = torch.zeros_like(self.mask)
        for rollout, of_one in enumerate(self._rows_of):
            parts = [getattr(row, name)[self._sampled[row.index]] for row in of_one]
            if parts:
                found[rollout, : self.lengths[rollout]] = torch.cat(parts)
        return found

    def split(self, matrix: torch.Tensor) -> dict[int, torch.Tensor]:
        """By index of the row, a tensor with one entry for each token of its response, 0 where it was not sampled."""
        found = {}
        for rollout, of_one in enumerate(self._rows_of):
            start = 0
            for row in of_one:
                places = self._sampled[row.index]
                found[row.index] = torch.zeros(len(row.response))
                found[row.index][places] = matrix[rollout, start : start + len(places)].float()
                start += len(places)
        return found

    def rewards(self, batch: TrainBatch) -> torch.Tensor:
        """The batch's rewards, each on its token. That of a call which was cut away is on the last one before it."""
        rewards = torch.zeros_like(self.mask)
        last = (self.lengths - 1).clamp(min=0)
        rewards[torch.arange(len(last)), last] = torch.tensor(batch.rewards, dtype=torch.float32)
        for turn in batch.turn_rewards:
            place = int(last[turn.rollout]) if turn.row is None else self._place(turn.rollout, turn.row, turn.token)
            rewards[turn.rollout, place] += turn.value
        return rewards

    def shares(self) -> dict[int, float]:
        """By index of the row, its share of its rollout's sampled tokens."""
        lengths = self.lengths.clamp(min=1).tolist()
        return {row.index: len(self._sampled[row.index]) / lengths[row.rollout] for of_one in self._rows_of for row in of_one}

    def _place(self, rollout: int, index: int, token: int) -> int:
        """Where the last sampled token up to `token` of a row is in its rollout's sequence."""
        start = 0
        for row in self._rows_of[rollout]:
            if row.index == index:
                return start + int((self._sampled[index] <= token - len(row.prompt)).sum()) - 1
            start += len(self._sampled[row.index])
        raise AssertionError(f"row {index} is not of rollout {rollout}")


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of each row, by its index; one entry per token of its response."""

    advantages: dict[int, torch.Tensor]
    returns: dict[int, torch.Tensor]
    metrics: dict[str, float]


def add_advantages(
    batch: TrainBatch, rows: list[Row], mine: list[Row], settings: PolicySettings, kl: KlController
) -> dict[str, float]:
    """Set the rows' `advantages` and `returns`; returns metrics, the same on all ranks. A collective.

    Args:
        rows: all of the batch; they are told what other ranks computed of them, as far as it is needed.
        mine: this rank's; these have what was computed of them. Some may be copies that train nothing.
    """
    needed = ["old_logprobs", "ref_logprobs"] if settings.kl_reward_coef else []
    needed += ["values"] if settings.critic else []
    if needed:
        _tell_all(rows, mine, needed)
    found = estimate(batch, rows, settings, kl)
    for row in [*rows, *mine]:
        row.advantages, row.returns = found.advantages[row.index], found.returns[row.index]
    return found.metrics


def estimate(batch: TrainBatch, rows: list[Row], settings: PolicySettings, kl: KlController) -> Estimate:
    """Advantages and returns of all rows, from what they hold.

    Raises:
        ConfigError: a user's estimator returned something that is not of the rewards' shape.
    """
    sequences = Sequences(rows, len(batch.rewards))
    rewards, metrics = sequences.rewards(batch), {}
    if settings.kl_reward_coef:
        old: Any = sequences.joined("old_logprobs")
        reference: Any = sequences.joined("ref_logprobs")
        divergence: torch.Tensor = verl.kl_penalty(old, reference, settings.kl_reward_type) * sequences.mask
        rewards = rewards - kl.coef * divergence
        mean = float((divergence.sum(-1) / sequences.lengths.clamp(min=1)).mean())
        metrics = {"learner/kl_in_reward": mean, "learner/kl_reward_coef": kl.coef}
        kl.update(mean, len(batch.rewards))
    advantages, returns = _run(rewards, sequences, batch, settings)
    metrics["learner/advantage_abs_mean"] = float((advantages.abs() * sequences.mask).sum() / sequences.mask.sum().clamp(min=1))
    of_rows = sequences.split(advantages)
    if settings.loss_agg_mode == "seq-mean-token-mean" or settings.loss_mode in MEANS_OF_ROWS:
        # the loss adds the means of rows and divides by rollouts: a rollout counts once if its rows weigh as much as they are long
        of_rows = {index: of_rows[index] * share for index, share in sequences.shares().items()}
    return Estimate(of_rows, sequences.split(returns), metrics)


def _run(
    rewards: torch.Tensor, sequences: Sequences, batch: TrainBatch, settings: PolicySettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by the estimator that the settings name, which gets what it has parameters for."""
    function = settings.own_estimator or verl.get_adv_estimator_fn(settings.adv_estimator)
    given: dict[str, Any] = {
        "token_level_rewards": rewards, "response_mask": sequences.mask, "index": np.array(batch.groups, dtype=object),
        "gamma": settings.gamma, "lam": settings.lam, "norm_adv_by_std_in_grpo": settings.norm_adv_by_std,
        "config": verl.AlgoConfig(gamma=settings.gamma, lam=settings.lam, norm_adv_by_std_in_grpo=settings.norm_adv_by_std),
    }  # fmt: skip
    if settings.critic is not None:
        given["values"] = sequences.joined("values")
    if batch.baselines is not None:
        given["reward_baselines"] = torch.tensor(batch.baselines, dtype=torch.float32)
    found = function(**taken(function, given))
    advantages, returns = found if isinstance(found, tuple) else (found, found)
    for name, matrix in (("advantages", advantages), ("returns", returns)):
        if not isinstance(matrix, torch.Tensor) or matrix.shape != rewards.shape:
            raise ConfigError(
                f"advantage estimator {settings.adv_estimator!r} returned {name} of shape {tuple(getattr(matrix, 'shape', ()))}; "
                f"they must have the shape of token_level_rewards, {tuple(rewards.shape)}"
            )
    return advantages, returns


def _tell_all(rows: list[Row], mine: list[Row], names: list[str]) -> None:
    """Set fields of all rows to what their ranks have."""
    own = {row.index: {name: getattr(row, name).numpy() for name in names} for row in mine}
    boxes: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(boxes, own)
    found = {index: values for box in boxes for index, values in box.items()}
    for row in rows:
        for name in names:
            setattr(row, name, torch.from_numpy(found[row.index][name]))
