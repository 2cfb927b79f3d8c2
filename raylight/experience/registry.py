"""Advantage estimators and policy losses by name: verl's, and those that users add by decorator. No torch.

A settings object holds the functions that it names (`PolicySettings`), so that they travel with it to the ranks.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from raylight.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
BaselineKind = Literal["group", "batch", "greedy", "none"]
"""Baseline of an estimator: the rollout's group, the whole batch, a greedy rollout of the same task, or none that is known."""


@dataclass(frozen=True)
class EstimatorTraits:
    """Facts about an advantage estimator that the driver needs before a batch is built."""

    baseline_kind: BaselineKind
    reads: tuple[str, ...] = ()
    """Settings that it reads, of those that only some of verl's estimators read."""


ESTIMATORS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits("none", reads=("gamma", "lam")),
    "gpg": EstimatorTraits("group"),
    "grpo": EstimatorTraits("group", reads=("norm_adv_by_std",)),
    "grpo_passk": EstimatorTraits("group", reads=("norm_adv_by_std",)),
    "grpo_vectorized": EstimatorTraits("group", reads=("norm_adv_by_std",)),
    "opo": EstimatorTraits("group"),
    "reinforce_plus_plus": EstimatorTraits("batch", reads=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorTraits("group"),
    "remax": EstimatorTraits("greedy"),
    "rloo": EstimatorTraits("group"),
    "rloo_vectorized": EstimatorTraits("group"),
}
"""verl's advantage estimators."""

_CLIP = ("clip_ratio_low", "clip_ratio_high")
_DUAL_CLIP = (*_CLIP, "clip_ratio_c")
LOSSES: dict[str, tuple[str, ...]] = {
    "clip_cov": (*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "cispo": _CLIP,
    "dppo_kl": _DUAL_CLIP,
    "dppo_tv": _DUAL_CLIP,
    "geo_mean": _CLIP,
    "gpg": (),
    "gspo": _CLIP,
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "sapo": ("tau_pos", "tau_neg"),
    "vanilla": _DUAL_CLIP,
}
"""verl's policy losses, each with the settings that it reads, of those that only some of them read."""
UNFIT_ESTIMATORS = {
    "gdpo": "it needs several rewards of each rollout by name, and a rollout has one here; combine them in the agent",
    "optimal_token_baseline": "it needs the sum of squared probabilities over the vocabulary, which the learners do not compute",
    "tir_optimal_token_baseline": "it needs the same sum",
}
UNFIT_LOSSES = {
    "bypass_mode": "say bypass_mode=True and choose the loss that is to see the engine's log-probs",
    "dro": "its policy_loss.dro_beta has no setting here; write it with raylight.policy_loss",
}
"""Those of verl that cannot be run here, and why."""

GIVEN_TO_ESTIMATORS = (
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
GIVEN_TO_LOSSES = ("old_log_prob", "log_prob", "advantages", "response_mask", "config")

_estimators: dict[str, Callable[..., Any]] = {}
_estimator_traits: dict[str, EstimatorTraits] = {}
_losses: dict[str, Callable[..., Any]] = {}


def advantage_estimator(
    name: str, *, baseline_kind: BaselineKind | None = None
) -> Callable[[Function], Function]:
    """Decorator that registers an advantage estimator, which `adv_estimator=name` then selects.

    The function receives those of the following that it has parameters for, by keyword:

    - token_level_rewards: float tensor of shape (rollouts, tokens): the sampled tokens of a rollout, one call after
      the other. The final reward is on its last token, rewards of turns are on the last token of the call they followed.
    - response_mask: float tensor of the same shape, 0 where a rollout has no more tokens.
    - index: array of group names, one per rollout.
    - values: the critic's values, of the same shape; this parameter requires `critic=CriticSettings(...)`.
    - reward_baselines: float tensor of shape (rollouts,): rewards of greedy rollouts of the same tasks.
    - gamma, lam, norm_adv_by_std_in_grpo: settings of these names (the last: `norm_adv_by_std`); config: verl's AlgoConfig.

    It returns advantages of that shape, or advantages and returns (the critic's targets). It runs on every rank with the
    whole batch, so it must be deterministic.

    Args:
        baseline_kind: "group" drops rollouts whose group has no other scored rollout and skips steps in which no group has
            different rewards; "batch" skips steps in which all rewards are equal; "greedy" adds a greedy rollout of each
            task, whose rewards are `reward_baselines`. None: "greedy" for a function with a parameter of that name,
            else "none", which drops and skips nothing.

    Raises:
        ConfigError: the name is taken, the function has a parameter that is not in the list, or `reward_baselines` is
            missing for "greedy" or does not fit another kind.
    """
    register = _decorator(
        name, _estimators, {*ESTIMATORS, *UNFIT_ESTIMATORS}, GIVEN_TO_ESTIMATORS, "advantage estimator"
    )

    def register_with_traits(function: Function) -> Function:
        takes_baselines = "reward_baselines" in inspect.signature(function).parameters
        kind = baseline_kind or ("greedy" if takes_baselines else "none")
        if takes_baselines != (kind == "greedy"):
            raise ConfigError(
                f"the advantage estimator {name!r} has baseline_kind={kind!r} and "
                f"{'a' if takes_baselines else 'no'} parameter reward_baselines; baseline_kind='greedy' and this "
                "parameter need each other"
            )
        register(function)
        _estimator_traits[name] = EstimatorTraits(kind)
        return function

    return register_with_traits


def policy_loss(name: str) -> Callable[[Function], Function]:
    """Decorator: make a function a policy loss that `loss_mode=name` chooses. It may be given, by keyword:

    - log_prob, old_log_prob: float tensors of shape (rows, tokens), of the policy that is trained and the one that sampled.
    - advantages, response_mask: of the same shape; the mask is 1 where a token was sampled.
    - config: verl's ActorConfig, with the settings of the algorithm (`clip_ratio_low`, ...).

    It returns the loss of each token, in that shape. Masking, importance weights and the mean over the batch
    (`loss_agg_mode`) are done outside, so that they are right for any number of ranks and micro-batches.

    Raises:
        ConfigError: the name is taken, or the function asks for something else.
    """
    return _decorator(name, _losses, {*LOSSES, *UNFIT_LOSSES}, GIVEN_TO_LOSSES, "policy loss")


def find_estimator(name: str) -> Callable[..., Any] | None:
    """The user's estimator of this name; None for one of verl's.

    Raises:
        ConfigError: there is none, or it cannot be run here.
    """
    return _find(name, _estimators, ESTIMATORS, UNFIT_ESTIMATORS, "adv_estimator", "advantage_estimator")


def find_loss(name: str) -> Callable[..., Any] | None:
    """The user's loss of this name; None for one of verl's.

    Raises:
        ConfigError: there is none, or it cannot be run here.
    """
    return _find(name, _losses, LOSSES, UNFIT_LOSSES, "loss_mode", "policy_loss")


def traits_of(name: str) -> EstimatorTraits:
    """Traits of an estimator that `find_estimator` accepts."""
    return _estimator_traits.get(name) or ESTIMATORS[name]


def takes_values(name: str, function: Callable[..., Any] | None) -> bool:
    """Whether an estimator needs a critic."""
    return name == "gae" if function is None else "values" in inspect.signature(function).parameters


def taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of `given` that the function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in parameters}


def _decorator(
    name: str, registered: dict[str, Callable[..., Any]], of_verl: set[str], given: tuple[str, ...], what: str
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        known = registered.get(name, function)
        if name in of_verl:
            raise ConfigError(f"verl has a {what} {name!r} already; give yours another name")
        if (known.__module__, known.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):  # a cell may be run again
            raise ConfigError(
                f"{known.__module__}.{known.__qualname__} is the {what} {name!r} already; choose another name"
            )
        parameters = inspect.signature(function).parameters.values()
        lacking = [
            p.name
            for p in parameters
            if p.name not in given and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if lacking:
            raise ConfigError(
                f"the {what} {name!r} asks for {', '.join(lacking)}; there is: {', '.join(given)}"
            )
        registered[name] = function
        return function

    return register


def _find(
    name: str, registered: dict[str, Any], of_verl: Any, unfit: dict[str, str], setting: str, decorator: str
) -> Any:
    if name in registered:
        return registered[name]
    if name in unfit:
        raise ConfigError(f"{setting} {name!r} of verl cannot be used: {unfit[name]}")
    if name not in of_verl:
        known = sorted([*of_verl, *registered])
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        raise ConfigError(
            f"there is no {setting} {name!r}; there is: {', '.join(near)}; add one with @raylight.{decorator}(...)"
        )
    return None
