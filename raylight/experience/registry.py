"""Advantage estimators and policy losses by name: verl's, and those that users add by decorator. No torch.

A settings object holds the functions that it names (`PolicySettings`), so that they travel with it to the ranks.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from raylight.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
BaselineKind = Literal["group", "batch", "baseline", "nothing"]
"""With what an estimator compares a rollout: others of its group, all of the batch, its baseline, or nothing that is known."""

BASELINE_KINDS: dict[str, BaselineKind] = {
    "gae": "nothing",
    "gpg": "group",
    "grpo": "group",
    "grpo_passk": "group",
    "grpo_vectorized": "group",
    "opo": "group",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "group",
    "remax": "baseline",
    "rloo": "group",
    "rloo_vectorized": "group",
}
"""verl's estimators, and with what each compares a rollout."""
LOSSES = ("clip_cov", "cispo", "dppo_kl", "dppo_tv", "geo_mean", "gpg", "gspo", "kl_cov", "sapo", "vanilla")
"""verl's policy losses."""
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
_losses: dict[str, Callable[..., Any]] = {}


def advantage_estimator(name: str) -> Callable[[Function], Function]:
    """Decorator: make a function an advantage estimator that `adv_estimator=name` chooses. It may be given, by keyword:

    - token_level_rewards: float tensor of shape (rollouts, tokens), where tokens are the sampled ones of a rollout, one call after
      the other; the final reward is on its last token, rewards of turns are on the last of the call they followed.
    - response_mask: float tensor of the same shape, 0 where a rollout has no more tokens.
    - index: array of the names of groups, one for each rollout.
    - values: of the critic, of the same shape; asking for them needs `critic=CriticSettings(...)`.
    - gamma, lam, norm_adv_by_std_in_grpo: settings of these names (the last: `norm_adv_by_std`); config: verl's AlgoConfig.

    It returns advantages of that shape, or advantages and returns (what a critic learns). It runs on every rank, and is given the
    whole batch there, so that it must not depend on chance.

    Raises:
        ConfigError: the name is taken, or the function asks for something else.
    """
    return _decorator(
        name, _estimators, {*BASELINE_KINDS, *UNFIT_ESTIMATORS}, GIVEN_TO_ESTIMATORS, "advantage estimator"
    )


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
    return _find(name, _estimators, BASELINE_KINDS, UNFIT_ESTIMATORS, "adv_estimator", "advantage_estimator")


def find_loss(name: str) -> Callable[..., Any] | None:
    """The user's loss of this name; None for one of verl's.

    Raises:
        ConfigError: there is none, or it cannot be run here.
    """
    return _find(name, _losses, LOSSES, UNFIT_LOSSES, "loss_mode", "policy_loss")


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
