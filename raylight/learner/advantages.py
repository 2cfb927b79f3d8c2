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
from raylight.experience.batch import TrainBatch
from raylight.experience.registry import select_arguments
from raylight.experience.settings import PolicySettings
from raylight.learner import verl_api as verl
from raylight.learner.rows import TrainRow

MEANS_OF_ROWS = ("sapo", "geo_mean")
"""Losses that take the mean of each row whatever `loss_agg_mode` says."""
EXACT = {"grpo_vectorized": "grpo"}
"""Estimators of verl that compute in float32 -> those that compute the same in the rewards' precision."""
WHITENS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that divide by the deviation over tokens, which verl refuses to take of a single one."""


class KlController:
    """The weight of the KL divergence in the reward: fixed, or steered towards a target (https://arxiv.org/abs/1909.08593)."""

    def __init__(self, settings: PolicySettings) -> None:
        self._steers = settings.kl_target is not None
        self._controller = (
            verl.FixedKLController(settings.kl_reward_coef)
            if settings.kl_target is None
            else verl.AdaptiveKLController(settings.kl_reward_coef, settings.kl_target, settings.kl_horizon)
        )

    @property
    def coef(self) -> float:
        return float(self._controller.value)

    @property
    def steered(self) -> float | None:
        """The weight where it is steered, for `go_on`; None where the settings say it."""
        return self.coef if self._steers else None

    def go_on(self, steered: float | None) -> None:
        """Steer on from a weight of before; what the settings say now is not overruled."""
        if self._steers and steered is not None:
            self._controller.value = steered

    def update(self, divergence: float, rollouts: int) -> None:
        """Take note of a batch's mean divergence."""
        self._controller.update(current_kl=divergence, n_steps=rollouts)


class Sequences:
    """Rollouts as sequences of their sampled tokens: matrices of shape (rollouts, tokens of the longest).

    Args:
        rows: of the batch, all of them.
    """

    def __init__(self, rows: list[TrainRow], rollouts: int) -> None:
        self._rows_of: list[list[TrainRow]] = [[] for _ in range(rollouts)]
        for row in rows:
            self._rows_of[row.rollout].append(row)
        self._sampled = {row.index: torch.nonzero(row.mask == 1)[:, 0] for row in rows}
        self.lengths = torch.tensor(
            [sum(len(self._sampled[row.index]) for row in of_one) for of_one in self._rows_of]
        )
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
        """The batch's rewards, each on its token. That of a call which was cut away is on the last one before it.

        In float64: in float32 the mean of equal rewards may differ from them by a rounding error, and their deviation is another,
        so that the one divided by the other would be an advantage out of nothing.
        """
        rewards = torch.zeros_like(self.mask, dtype=torch.float64)
        last = (self.lengths - 1).clamp(min=0)
        rewards[torch.arange(len(last)), last] = torch.tensor(batch.rewards, dtype=torch.float64)
        for turn in batch.turn_rewards:
            place = (
                int(last[turn.rollout])
                if turn.row is None
                else self._place(turn.rollout, turn.row, turn.token)
            )
            rewards[turn.rollout, place] += turn.value
        return rewards

    def shares(self) -> dict[int, float]:
        """By index of the row, its share of its rollout's sampled tokens."""
        lengths = self.lengths.clamp(min=1).tolist()
        return {
            row.index: len(self._sampled[row.index]) / lengths[row.rollout]
            for of_one in self._rows_of
            for row in of_one
        }

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
    shares: dict[int, float]
    """Of its rollout's sampled tokens, how many are the row's."""
    metrics: dict[str, float]


def add_advantages(
    batch: TrainBatch, rows: list[TrainRow], mine: list[TrainRow], settings: PolicySettings, kl: KlController
) -> dict[str, float]:
    """Set the rows' `advantages`, `returns` and `share`; returns metrics, the same on all ranks. A collective.

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
        row.share = found.shares[row.index]
    return found.metrics


def estimate(batch: TrainBatch, rows: list[TrainRow], settings: PolicySettings, kl: KlController) -> Estimate:
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
    metrics["learner/advantage_abs_mean"] = float(
        (advantages.abs() * sequences.mask).sum() / sequences.mask.sum().clamp(min=1)
    )
    of_rows, shares = sequences.split(advantages), sequences.shares()
    if settings.loss_agg_mode == "seq-mean-token-mean" or settings.loss_mode in MEANS_OF_ROWS:
        # the loss adds the means of rows and divides by rollouts: a rollout counts once if its rows weigh as much as they are long
        of_rows = {index: of_rows[index] * share for index, share in shares.items()}
    return Estimate(of_rows, sequences.split(returns), shares, metrics)


def _run(
    rewards: torch.Tensor, sequences: Sequences, batch: TrainBatch, settings: PolicySettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by the estimator that the settings name, which gets what it has parameters for."""
    name, own = settings.adv_estimator, settings.user_estimator
    function = own or verl.get_adv_estimator_fn(EXACT.get(name, name))
    given: dict[str, Any] = {
        "token_level_rewards": rewards.float() if own else rewards,
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
        given["values"] = sequences.joined("values")
    if batch.baselines is not None:
        given["reward_baselines"] = torch.tensor(batch.baselines, dtype=torch.float64)
    single = name in WHITENS and sequences.mask.sum() == 1
    found = function(**select_arguments(function, _twice(given) if single else given))
    advantages, returns = found if isinstance(found, tuple) else (found, found)
    if single:  # it is as good as the mean of two of its kind, which is what it is compared with
        advantages, returns = advantages[: len(rewards)], returns[: len(rewards)]
    _check(name, "advantages", advantages, sequences)
    _check(name, "returns", returns, sequences)
    return advantages.float(), returns.float()


def _twice(given: dict[str, Any]) -> dict[str, Any]:
    """The same with every rollout twice."""
    return {
        name: torch.cat([value, value])
        if isinstance(value, torch.Tensor)
        else np.concatenate([value, value])
        if isinstance(value, np.ndarray)
        else value
        for name, value in given.items()
    }


def _check(name: str, what: str, matrix: Any, sequences: Sequences) -> None:
    """Raise ConfigError unless an estimator returned a finite number for every sampled token."""
    wanted = tuple(sequences.mask.shape)
    if not isinstance(matrix, torch.Tensor) or matrix.shape != wanted:
        raise ConfigError(
            f"advantage estimator {name!r} returned {what} of shape {tuple(getattr(matrix, 'shape', ()))}; "
            f"they must have the shape of token_level_rewards, {wanted}"
        )
    wrong = ~matrix[sequences.mask == 1].float().isfinite()
    if wrong.any():
        raise ConfigError(
            f"advantage estimator {name!r} returned {what} that are not finite, for {int(wrong.sum())} of {len(wrong)} sampled "
            "tokens: a reward is out of range, or the estimator divides by a deviation of 0 (add a small number to it)"
        )


def _tell_all(rows: list[TrainRow], mine: list[TrainRow], names: list[str]) -> None:
    """Set fields of all rows to what their ranks have."""
    own = {row.index: {name: getattr(row, name).numpy() for name in names} for row in mine}
    boxes: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(boxes, own)
    found = {index: values for box in boxes for index, values in box.items()}
    for row in rows:
        for name in names:
            setattr(row, name, torch.from_numpy(found[row.index][name]))
