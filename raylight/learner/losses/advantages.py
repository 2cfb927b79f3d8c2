"""Advantages of rollouts, computed by verl's estimators or the user's.

Law: statistics are over rollouts, never over rows, so that a rollout of several rows counts once.

An estimator receives a rollout as one sequence: all its sampled tokens, row after row. The reward is on the
last token; a turn reward is on the last token of the call before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raylight.errors import ConfigError
from raylight.experience.batches.shards import BatchOutline, PlacedTurn
from raylight.experience.settings.advantages import GiGPOAdvantage, OPDAdvantage
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.settings.registry import select_arguments
from raylight.experience.token_alignment import NOT_JUDGED
from raylight.learner import verl_api as verl
from raylight.learner.tokens.rows import TrainRow

EXACT_EQUIVALENTS = {"grpo_vectorized": "grpo"}
"""verl's estimators that compute in float32 -> equivalent ones that compute in the dtype of the rewards."""
WHITENING_ESTIMATORS = ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that whiten over tokens. verl raises if there is only one token."""


def _grpo(rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, by_std: bool) -> torch.Tensor:
    """Return the advantages of verl's GRPO, in the shape of the mask."""
    advantages, _ = verl.get_adv_estimator_fn("grpo")(
        token_level_rewards=rewards, response_mask=mask, index=index, norm_adv_by_std_in_grpo=by_std
    )
    return advantages


def estimate_gdpo(
    response_mask: torch.Tensor,
    index: np.ndarray,
    reward_parts: torch.Tensor,
    reward_weights: list[float],
    norm_adv_by_std_in_grpo: bool,
) -> torch.Tensor:
    """Return advantages from named rewards that are normalised separately (GDPO,
    https://arxiv.org/abs/2601.05242), whitened over the tokens of the batch.

    It is verl's estimator, which computes in float32, in the dtype of the rewards.

    Args:
        reward_parts: named rewards, shape (rollouts, names).
        reward_weights: weight of each name.
    """
    combined = torch.zeros(response_mask.shape, dtype=reward_parts.dtype)
    for part, weight in zip(reward_parts.T, reward_weights, strict=True):
        normalised = _grpo(part[:, None], response_mask, index, norm_adv_by_std_in_grpo)
        combined += weight * normalised
    return verl.masked_whiten(combined, response_mask) * response_mask


def estimate_opo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, lengths: torch.Tensor
) -> torch.Tensor:
    """Return rewards less the mean of the group weighted by length (OPO, https://arxiv.org/abs/2505.23585),
    shape (rollouts, tokens).

    verl's estimator weights by trained tokens, so that a masked rollout would not count.

    Args:
        lengths: sampled tokens of each rollout, trained or not.
    """
    rewards = token_level_rewards.sum(-1)
    baselines = torch.zeros_like(rewards)
    for group in set(index):
        own = torch.from_numpy(index == group)
        if own.sum() > 1:
            baselines[own] = (lengths * rewards)[own].sum() / lengths[own].sum().clamp(min=1)
    return (rewards - baselines)[:, None] * response_mask


def _count_masked(
    advantages: torch.Tensor,
    returns: torch.Tensor,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    index: np.ndarray,
    lengths: torch.Tensor,
) -> None:
    """Count rollouts without trained tokens in verl's baselines of tokens, which leave them out: up to its
    length, each has the mean weight of the group's others."""
    masked = ~mask.any(-1)
    goes_on = masked[:, None] & (torch.arange(mask.shape[1]) < lengths[:, None])
    totals, trained = rewards.sum(-1, keepdim=True) * goes_on, mask == 1
    for group in set(index[masked.numpy()]):
        own = torch.from_numpy(index == group)
        others, added = trained[own].sum(0), goes_on[own].sum(0)
        # verl has no baseline where one rollout goes on
        baselines = torch.where(others > 1, returns - advantages, returns).where(trained, 0.0)[own].sum(0)
        baselines = (baselines + totals[own].sum(0)) / (others + added).clamp(min=1)
        advantages[own] = torch.where(trained & (added > 0), returns - baselines, advantages)[own]


def estimate_opd(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    norm_adv_by_std_in_grpo: bool,
    gamma: float,
    teacher_log_ratios: torch.Tensor,
    span_ends: torch.Tensor,
    reward_coef: float,
) -> torch.Tensor:
    """Return advantages of on-policy distillation, shape (rollouts, tokens): the teacher's log ratio to the
    policy of each token, discounted over the tokens after it, plus GRPO's advantages with a weight.

    Args:
        teacher_log_ratios: bounded log ratios, shape (rollouts, tokens); of a span at its last token.
        span_ends: True for the last token of a span, same shape. All tokens of a span have its log ratio.
        reward_coef: the weight; 0 ignores the rewards.
    """
    advantages, later = torch.zeros_like(teacher_log_ratios), 0.0 * teacher_log_ratios[:, 0]
    for token in reversed(range(advantages.shape[1])):
        discount = torch.where(span_ends[:, token], gamma, 1.0)
        later = advantages[:, token] = teacher_log_ratios[:, token] + discount * later
    if reward_coef:
        of_rewards = _grpo(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo)
        advantages += reward_coef * of_rewards
    return advantages * response_mask


def estimate_gigpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    norm_adv_by_std_in_grpo: bool,
    turns: Sequence[PlacedTurn],
    gigpo: GiGPOAdvantage,
) -> torch.Tensor:
    """Return the weighted sum of GRPO's advantages of rollouts and of their turns (GiGPO,
    https://arxiv.org/abs/2505.10978), shape (rollouts, tokens).

    Args:
        turns: the turns of each rollout in order.
    """
    of_rollouts = _grpo(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo)
    values, groups = torch.zeros(len(turns), 1, dtype=torch.float64), np.empty(len(turns), dtype=object)
    later = dict.fromkeys(range(len(index)), 0.0)
    for number, turn in reversed(list(enumerate(turns))):
        later[turn.rollout] = turn.reward + gigpo.turn_gamma * later[turn.rollout]
        values[number], groups[number] = later[turn.rollout], (index[turn.rollout], turn.state)
    # a turn without another of its state has no baseline; the estimator would return its return
    counts = Counter(groups)
    compared = torch.tensor([[float(counts[group] > 1)] for group in groups], dtype=torch.float64)
    of_turns = _grpo(values, compared, groups, norm_adv_by_std_in_grpo)
    advantages = gigpo.rollout_coef * of_rollouts
    for turn, value in zip(turns, of_turns[:, 0], strict=True):
        advantages[turn.rollout, turn.start : turn.end] += gigpo.turn_coef * value
    return advantages * response_mask


def compare_spans(teacher: torch.Tensor, own: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `teacher_log_ratios`, of each span at its last token, and `span_ends`, both (rollouts, tokens).

    Args:
        teacher: log-probs of a teacher, shape (rollouts, tokens); with another tokenizer, of spans,
            see `experience.token_alignment`.
        own: log-probs of the tokens by the policy, same shape.
    """
    ends, ratios = ~teacher.isnan(), torch.zeros_like(own)
    total = torch.zeros_like(own[:, 0])
    for token in range(own.shape[1]):
        total = total + own[:, token]
        ratios[:, token] = torch.where(ends[:, token], teacher[:, token] - total, 0.0)
        total = torch.where(ends[:, token], 0.0, total)
    return {"teacher_log_ratios": ratios.where(teacher != NOT_JUDGED, 0.0), "span_ends": ends}


OWN_ESTIMATORS: dict[str, Callable[..., object]] = {
    "gdpo": estimate_gdpo,
    "gigpo": estimate_gigpo,
    "opd": estimate_opd,
    "opo": estimate_opo,
}
"""Estimators that raylight computes itself."""


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
        outline: all rollouts and rows of the batch.
    """

    def __init__(self, outline: BatchOutline) -> None:
        self._outline, self._starts = outline, outline.starts
        self.lengths = torch.from_numpy(outline.sampled_of_rollouts)
        width = max(int(self.lengths.max()), 1)
        self.mask = (torch.arange(width) < self.lengths[:, None]).float()

    def matrix(self, values: Mapping[int, np.ndarray]) -> torch.Tensor:
        """Arrange values of sampled tokens, by row index, as (rollouts, tokens). Padding is 0."""
        matrix = torch.zeros_like(self.mask)
        for index, row_values in values.items():
            start, rollout = self._starts[index], self._outline.owners[index]
            matrix[rollout, start : start + len(row_values)] = torch.from_numpy(row_values)
        return matrix

    def select(self, rows: list[TrainRow], matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each row's values of a matrix, shape (response tokens,), 0 where a token was not sampled."""
        lengths = [len(row.response) for row in rows]
        sampled = torch.cat([row.mask for row in rows]) == 1
        row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))[sampled]
        counts = row_of.bincount(minlength=len(rows))
        starts = torch.from_numpy(self._starts)[[row.index for row in rows]]
        positions = torch.arange(len(row_of)) + (starts - counts.cumsum(0) + counts)[row_of]
        values = torch.zeros(len(sampled))
        values[sampled] = matrix[torch.tensor([row.rollout for row in rows])[row_of], positions].float()
        return values.split(lengths)

    def rewards(self) -> torch.Tensor:
        """Return the batch's rewards, each on its token, shape (rollouts, tokens).

        The reward of a truncated call, or of one whose last tokens were forced, is on the last trained token
        before; without one, on the rollout's first.

        The dtype is float64: in float32 the mean of equal rewards may differ from them by a rounding error,
        as may their deviation, and the quotient of the two would be an advantage without a cause.
        """
        rewards = torch.zeros_like(self.mask, dtype=torch.float64)
        last = (self.lengths - 1).clamp(min=0)
        rewards[torch.arange(len(last)), last] = torch.tensor(self._outline.rewards, dtype=torch.float64)
        for turn in self._outline.turn_rewards:
            rewards[turn.rollout, turn.position] += turn.value
        return rewards

    def row_fraction(self, row: TrainRow) -> float:
        """Return the fraction of its rollout's sampled tokens that a row has."""
        return int(self._outline.sampled[row.index]) / max(int(self.lengths[row.rollout]), 1)


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator, as matrices of `sequences`, shape (rollouts, tokens)."""

    sequences: RolloutSequences
    advantages: torch.Tensor
    returns: torch.Tensor
    metrics: dict[str, float]

    def assign(self, rows: list[TrainRow]) -> None:
        """Set the advantages, returns and rollout fractions of rows."""
        advantages, returns = (self.sequences.select(rows, m) for m in (self.advantages, self.returns))
        for row, row_advantages, row_returns in zip(rows, advantages, returns, strict=True):
            row.rollout_fraction = self.sequences.row_fraction(row)
            row.advantages, row.returns = row_advantages, row_returns


def add_advantages(
    outline: BatchOutline, rows: list[TrainRow], settings: PolicySettings, kl: KlController
) -> dict[str, float]:
    """Set the rows' advantages, returns, rollout fractions and, with a critic, values that other ranks
    computed; return metrics, equal on all ranks. A collective.

    Args:
        rows: this rank's; some may be copies with an empty mask.
    """
    fields = ["old_logprobs", "ref_logprobs"] if settings.kl_reward_coef else []
    fields += ["values"] if settings.critic else []
    if settings.has_token_baselines:
        fields += ["old_logprobs", "sum_pi_squared"]
        fields += ["weights"] if settings.importance_level is not None else []
    if settings.needs_teacher_logprobs and any(row.teacher_logprobs is None for row in rows):
        raise ConfigError(
            f"adv_estimator {settings.advantage.name!r} was given rows without log-probs of a teacher; use "
            "rl.OPD(teacher=...) with raylight's own training loop"
        )
    # without a pass before the update, the engine's log-probs are the policy's
    own = "old_logprobs" if all(row.old_logprobs is not None for row in rows) else "engine_logprobs"
    fields += ["teacher_logprobs", own] if settings.needs_teacher_logprobs else []
    sequences = RolloutSequences(outline)
    matrices = {name: sequences.matrix(_all_gather_field(rows, name)) for name in dict.fromkeys(fields)}
    if settings.needs_teacher_logprobs:
        matrices |= compare_spans(matrices["teacher_logprobs"], matrices[own])
    result = estimate(outline, sequences, matrices, settings, kl)
    result.assign(rows)
    if settings.critic and (others := [row for row in rows if row.values is None]):
        for row, values in zip(others, sequences.select(others, matrices["values"]), strict=True):
            row.values = values
    return result.metrics


def estimate(
    outline: BatchOutline,
    sequences: RolloutSequences,
    matrices: Mapping[str, torch.Tensor],
    settings: PolicySettings,
    kl: KlController,
) -> Estimate:
    """Compute advantages and returns of all rollouts.

    Args:
        matrices: fields of shape (rollouts, tokens) by name: `old_logprobs` and `ref_logprobs` for a KL
            penalty in the reward, `values` for a critic, `old_logprobs`, `sum_pi_squared` and `weights`
            for baselines of tokens, `teacher_log_ratios` for a teacher.

    Raises:
        ConfigError: a user's estimator returned something of another shape, or a value that is not finite.
    """
    rewards, metrics = sequences.rewards(), {}
    if settings.kl_reward_coef:
        old: Any = matrices["old_logprobs"]
        reference: Any = matrices["ref_logprobs"]
        token_kl: torch.Tensor = verl.kl_penalty(old, reference, settings.kl_reward_type) * sequences.mask
        rewards = rewards - kl.coef * token_kl
        trained = sequences.lengths > 0
        mean = float((token_kl.sum(-1) / sequences.lengths)[trained].mean())
        metrics = {"learner/kl_in_reward": mean, "learner/kl_reward_coef": kl.coef}
        kl.update(mean, int(trained.sum()))
    advantages, returns = _run_estimator(rewards, sequences, outline, matrices, settings)
    if outline.weights is not None:
        advantages = advantages * torch.tensor(outline.weights, dtype=advantages.dtype)[:, None]
    metrics["learner/advantage_abs_mean"] = float(
        (advantages.abs() * sequences.mask).sum() / sequences.mask.sum().clamp(min=1)
    )
    if settings.needs_teacher_logprobs:
        kl_of_tokens = -matrices["teacher_log_ratios"] * sequences.mask
        metrics["learner/teacher_kl"] = float(kl_of_tokens.sum() / sequences.mask.sum().clamp(min=1))
    if settings.critic is not None:
        sampled = sequences.mask == 1
        metrics["critic/explained_variance"] = explained_variance(
            matrices["values"][sampled], returns[sampled]
        )
    return Estimate(sequences, advantages, returns, metrics)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Return the fraction of the variance of returns that the values explain; both of shape (tokens,).

    1 means all of it, 0 no more than a constant. It is 0 if all returns are equal.
    """
    variance = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 1e-12 else 0.0


def _run_estimator(
    rewards: torch.Tensor,
    sequences: RolloutSequences,
    outline: BatchOutline,
    matrices: Mapping[str, torch.Tensor],
    settings: PolicySettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the estimator with the arguments it takes; return advantages and returns (rollouts, tokens)."""
    name, user_function = settings.advantage.name, settings.user_estimator
    common: dict[str, Any] = {  # an estimator that has no setting for one gets the default
        "gamma": getattr(settings.advantage, "gamma", 1.0),
        "lam": getattr(settings.advantage, "lam", 1.0),
        "norm_adv_by_std_in_grpo": getattr(settings.advantage, "norm_adv_by_std", True),
    }
    function = user_function or OWN_ESTIMATORS.get(name)
    function = function or verl.get_adv_estimator_fn(EXACT_EQUIVALENTS.get(name, name))
    index = np.array(outline.groups, dtype=object)
    lengths = sequences.lengths if outline.lengths is None else torch.tensor(outline.lengths)
    arguments: dict[str, object] = {
        "token_level_rewards": rewards.float() if user_function else rewards,
        "response_mask": sequences.mask,
        "index": index,
        "lengths": lengths,
        **common,
        "config": verl.AlgoConfig(**common),
    }
    if "values" in matrices:
        arguments["values"] = matrices["values"]
    if outline.parts is not None:
        arguments["reward_parts"] = torch.tensor(outline.parts, dtype=torch.float64)
        arguments["reward_weights"] = list((settings.reward_weights or {}).values())
    if settings.has_token_baselines:
        arguments |= {
            "old_log_probs": matrices["old_logprobs"].double(),
            "sum_pi_squared": matrices["sum_pi_squared"].double(),
            "rollout_is_weights": matrices.get("weights"),
        }
    if settings.turn_advantage is not None:
        if not outline.turns:
            raise ConfigError(
                f"adv_estimator {name!r} was given rollouts without turns; use rl.algorithms.GiGPO with "
                "raylight's own training loop"
            )
        arguments |= {"turns": outline.turns, "gigpo": settings.turn_advantage}
    if isinstance(settings.advantage, OPDAdvantage):
        # a divergence over the vocabulary is in the loss
        bound, none = settings.advantage.log_ratio_clip, torch.zeros_like(sequences.mask)
        log_ratios = matrices.get("teacher_log_ratios", none)
        arguments["span_ends"] = matrices.get("span_ends", none == 0)
        arguments["teacher_log_ratios"] = log_ratios.double().clamp(-bound, bound)
        arguments["reward_coef"] = settings.advantage.reward_coef
    if outline.baselines is not None:
        arguments["reward_baselines"] = torch.tensor(outline.baselines, dtype=torch.float64)
    single_token = name in WHITENING_ESTIMATORS and sequences.mask.sum() == 1
    if single_token:  # verl cannot whiten it; two copies of it have the same mean
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        arguments |= {key: torch.cat([value, value]) for key, value in tensors.items()}
        arguments["index"] = np.concatenate([index, index])
    result = function(**select_arguments(function, arguments))
    advantages, returns = result if isinstance(result, tuple) else (result, result)
    if single_token:
        advantages, returns = advantages[: len(rewards)], returns[: len(rewards)]
    if settings.has_token_baselines:
        _count_masked(advantages, returns, rewards, sequences.mask, index, lengths)
    _check_result(name, "advantages", advantages, sequences)
    _check_result(name, "returns", returns, sequences)
    return advantages.float(), returns.float()


def _check_result(name: str, kind: str, matrix: object, sequences: RolloutSequences) -> None:
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


def _all_gather_field(rows: list[TrainRow], name: str) -> dict[int, np.ndarray]:
    """Return a field of all ranks' rows by row index, shape (sampled tokens,). A collective."""
    own = {
        row.index: values[row.mask == 1].numpy()
        for row in rows
        if (values := getattr(row, name)) is not None and row.mask.any()
    }
    ranks: list[dict[int, np.ndarray]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own)
    return {index: values for rank in ranks for index, values in rank.items()}
