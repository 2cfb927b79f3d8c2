"""Registry of advantage estimators and policy losses: verl's, and those that users add by decorator.

A settings object stores the functions that it names (`PolicySettings`), so that they reach the ranks with it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from raylight.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
BaselineKind = Literal["group", "batch", "greedy", "none"]
"""Baseline of an estimator: the group, the batch, a greedy rollout of the same task, or none known here."""


@dataclass(frozen=True)
class EstimatorTraits:
    """Facts about an advantage estimator that the driver needs before a batch is built."""

    baseline_kind: BaselineKind
    reads: tuple[str, ...] = ()
    """Settings that it reads, among those that only some of verl's estimators read."""


ESTIMATORS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits("none", reads=("gamma", "lam")),
    "gdpo": EstimatorTraits("group", reads=("norm_adv_by_std", "reward_weights")),
    "gpg": EstimatorTraits("group"),
    "grpo": EstimatorTraits("group", reads=("norm_adv_by_std",)),
    "grpo_passk": EstimatorTraits("group", reads=("norm_adv_by_std",)),
    "grpo_vectorized": EstimatorTraits("group", reads=("norm_adv_by_std",)),
    "opd": EstimatorTraits("none", reads=("gamma", "log_ratio_clip", "norm_adv_by_std", "reward_coef")),
    "opo": EstimatorTraits("group"),
    "optimal_token_baseline": EstimatorTraits("group"),
    "reinforce_plus_plus": EstimatorTraits("batch", reads=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorTraits("group"),
    "remax": EstimatorTraits("greedy"),
    "rloo": EstimatorTraits("group"),
    "rloo_vectorized": EstimatorTraits("group"),
    "tir_optimal_token_baseline": EstimatorTraits("group"),
}
"""Advantage estimators: verl's, and `opd`, which compares the policy with a teacher."""
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators with a baseline for each token, from the probabilities of the policy before the update."""

_CLIP = ("clip_ratio_low", "clip_ratio_high")
_DUAL_CLIP = (*_CLIP, "clip_ratio_c")
LOSSES: dict[str, tuple[str, ...]] = {
    "clip_cov": (*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "cispo": _CLIP,
    "dppo_kl": _DUAL_CLIP,
    "dppo_tv": _DUAL_CLIP,
    "dro": ("dro_beta",),
    "geo_mean": _CLIP,
    "gpg": (),
    "gspo": _CLIP,
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "sapo": ("tau_pos", "tau_neg"),
    "vanilla": _DUAL_CLIP,
}
"""verl's policy losses, each with the settings that it reads, among those that only some of them read."""
UNCLIPPED_LOSSES = ("dro", "gpg", "kl_cov")
"""verl's policy losses that bound neither the ratio nor its gradient."""
UNSUPPORTED_LOSSES = {
    "bypass_mode": "it is a setting here: bypass_mode=True with loss_mode='vanilla' for its ppo_clip, or "
    "with loss_mode='cispo', clip_ratio_low=10 and clip_ratio_high=rollout_is_threshold - 1 for its "
    "reinforce",
}
"""verl's losses that cannot be chosen here, and the reason."""

ESTIMATOR_ARGUMENTS = (
    "token_level_rewards",
    "response_mask",
    "index",
    "values",
    "reward_baselines",
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "config",
)
LOSS_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask", "config")

_estimators: dict[str, Callable[..., Any]] = {}
_estimator_traits: dict[str, EstimatorTraits] = {}
_losses: dict[str, Callable[..., Any]] = {}


def advantage_estimator(
    name: str, *, baseline_kind: BaselineKind | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function as the advantage estimator that `adv_estimator=name` selects.

    The function receives, by keyword, those of the following arguments that it has a parameter for:

    - token_level_rewards: float tensor of shape (rollouts, tokens). The tokens are the sampled ones of a
      rollout, one call after the other. The final reward is on the last token, a turn reward on the last
      token of the call before it.
    - response_mask: float tensor of the same shape, 0 after the end of a rollout.
    - index: array of group names, one per rollout.
    - values: the critic's values, of the same shape; this parameter requires `critic=CriticSettings(...)`.
    - reward_baselines: float tensor of shape (rollouts,), the rewards of greedy rollouts of the same tasks.
    - gamma, lam, norm_adv_by_std_in_grpo: the settings of these names (the last is `norm_adv_by_std`).
    - config: verl's AlgoConfig with the same three settings.

    It returns advantages of that shape, or a tuple of advantages and returns (the critic's targets). It runs
    on every rank with the whole batch, so it must be deterministic.

    Args:
        baseline_kind: "group" drops rollouts whose group has no other scored rollout and skips steps in which
            no group has different rewards; "batch" skips steps in which all rewards are equal; "greedy" adds
            a greedy rollout of each task, whose rewards are `reward_baselines`; "none" drops and skips
            nothing. None chooses "greedy" for a function with a parameter `reward_baselines`, else "none".

    Raises:
        ConfigError: the name is taken, the function has a parameter that is not in the list, or
            `reward_baselines` is missing for "greedy" or does not fit another kind.
    """
    register = _registrar(name, _estimators, {*ESTIMATORS}, ESTIMATOR_ARGUMENTS, "advantage estimator")

    def register_with_traits(function: Function) -> Function:
        takes_baselines = "reward_baselines" in inspect.signature(function).parameters
        kind = baseline_kind or ("greedy" if takes_baselines else "none")
        if takes_baselines != (kind == "greedy"):
            raise ConfigError(
                f"the advantage estimator {name!r} has baseline_kind={kind!r} and "
                f"{'a' if takes_baselines else 'no'} parameter reward_baselines; baseline_kind='greedy' and "
                "this parameter need each other"
            )
        register(function)
        _estimator_traits[name] = EstimatorTraits(kind)
        return function

    return register_with_traits


def policy_loss(name: str) -> Callable[[Function], Function]:
    """Register the decorated function as the policy loss that `loss_mode=name` chooses.

    The function may have these parameters, which are passed by keyword:

    - log_prob, old_log_prob: float tensors of shape (rows, tokens), of the policy that is trained and the one
      that sampled.
    - advantages, response_mask: tensors of the same shape; the mask is 1 for sampled tokens.
    - config: verl's ActorConfig, with the settings of the algorithm (`clip_ratio_low`, ...).

    It returns the loss of each token, in that shape. The caller applies the mask, importance weights and the
    mean over the batch (`loss_agg_mode`), so that they are right for any number of ranks and micro-batches.

    Raises:
        ConfigError: the name is taken, or the function has another parameter.
    """
    return _registrar(name, _losses, {*LOSSES, *UNSUPPORTED_LOSSES}, LOSS_ARGUMENTS, "policy loss")


def resolve_estimator(name: str) -> Callable[..., Any] | None:
    """Return the user's advantage estimator of this name, or None for one of verl's.

    Raises:
        ConfigError: the name is unknown.
    """
    return _resolve(name, _estimators, ESTIMATORS, {}, "adv_estimator", "advantage_estimator")


def resolve_loss(name: str) -> Callable[..., Any] | None:
    """Return the user's policy loss of this name, or None for one of verl's.

    Raises:
        ConfigError: the name is unknown, or verl's loss is a setting here.
    """
    return _resolve(name, _losses, LOSSES, UNSUPPORTED_LOSSES, "loss_mode", "policy_loss")


def estimator_traits(name: str) -> EstimatorTraits:
    """Return the traits of an advantage estimator that `resolve_estimator` accepts."""
    return _estimator_traits.get(name) or ESTIMATORS[name]


def needs_critic(name: str, function: Callable[..., Any] | None) -> bool:
    """True if an advantage estimator (`function` is None for one of verl's) needs the values of a critic."""
    return name == "gae" if function is None else "values" in inspect.signature(function).parameters


def takes_old_logprobs(loss: Callable[..., Any]) -> bool:
    """True if a user's policy loss compares the log-probs with those of the old policy."""
    return "old_log_prob" in inspect.signature(loss).parameters


def select_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _registrar(
    name: str,
    registered: dict[str, Callable[..., Any]],
    verl_names: set[str],
    arguments: tuple[str, ...],
    kind: str,
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        if name in verl_names:
            raise ConfigError(f"the name {name!r} is already a {kind} of verl; choose another name")
        known = registered.get(name, function)
        # the same function may be registered again, as in a notebook cell that is run twice
        if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ConfigError(
                f"the {kind} {name!r} is already {known.__module__}.{known.__qualname__}; choose another name"
            )
        parameters = inspect.signature(function).parameters.values()
        unknown = [
            p.name
            for p in parameters
            if p.name not in arguments and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if unknown:
            raise ConfigError(
                f"the {kind} {name!r} has unknown parameters: {', '.join(unknown)}; it may have: "
                f"{', '.join(arguments)}"
            )
        registered[name] = function
        return function

    return register


def _resolve(
    name: str,
    registered: dict[str, Any],
    verl_names: Collection[str],
    unsupported: dict[str, str],
    setting: str,
    decorator: str,
) -> Any:
    if name in registered:
        return registered[name]
    if name in unsupported:
        raise ConfigError(f"verl's {setting} {name!r} cannot be used: {unsupported[name]}")
    if name not in verl_names:
        known = sorted([*verl_names, *registered])
        nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        raise ConfigError(
            f"unknown {setting} {name!r}; choose from: {', '.join(nearest)}, or register your own with "
            f"@raylight.{decorator}(...)"
        )
    return None
