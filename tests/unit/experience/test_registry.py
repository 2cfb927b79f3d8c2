"""Estimators and losses by name: found, refused, and carried to where they run."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from raylight.algorithms import PolicyAlgorithm
from raylight.errors import ConfigError
from raylight.experience.registry import advantage_estimator, policy_loss
from raylight.experience.settings import CriticSettings, PolicySettings


@advantage_estimator("own_plain")
def plain(token_level_rewards: Any, response_mask: Any) -> Any:
    return token_level_rewards


@advantage_estimator("own_with_values")
def with_values(token_level_rewards: Any, values: Any, **more: Any) -> Any:
    return token_level_rewards - values


@policy_loss("own_loss")
def loss(log_prob: Any, advantages: Any, config: Any = None) -> Any:
    return -log_prob * advantages


def test_a_function_travels_with_the_settings_that_name_it() -> None:
    algorithm = PolicyAlgorithm(model="m", adv_estimator="own_plain", loss_mode="own_loss")
    settings = PolicySettings(**{name: getattr(algorithm, name) for name in PolicySettings.model_fields})
    there = cloudpickle.loads(cloudpickle.dumps(settings))
    assert there.own_estimator(3, None) == 3
    assert there.own_loss(2, 4) == -8
    assert (PolicySettings().own_estimator, PolicySettings().own_loss) == (None, None)


def test_a_function_that_was_not_imported_by_the_other_process_travels_too() -> None:
    """As in a script or a notebook, whose functions cannot be imported."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("def mine(token_level_rewards):\n    return token_level_rewards + 1", scope)
    advantage_estimator("own_main")(scope["mine"])
    sent = cloudpickle.dumps(PolicySettings(adv_estimator="own_main"))
    assert b"token_level_rewards" in sent
    assert cloudpickle.loads(sent).own_estimator(1) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adv_estimator": "gropo"}, "no adv_estimator 'gropo'; there is: grpo"),
        ({"adv_estimator": "own_plian"}, "there is: own_plain"),
        ({"loss_mode": "gspoo"}, "no loss_mode 'gspoo'; there is: gspo"),
        ({"adv_estimator": "gdpo"}, "'gdpo' of verl cannot be used: it needs several rewards"),
        ({"loss_mode": "bypass_mode"}, "say bypass_mode=True"),
        ({"adv_estimator": "own_with_values"}, "a critic need each other"),
        ({"adv_estimator": "own_plain", "critic": CriticSettings()}, "a critic need each other"),
    ],
)
def test_an_algorithm_that_cannot_be_run_is_refused_before_anything_starts(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyAlgorithm(model="m", **given)


def test_an_estimator_that_takes_values_gets_a_critic() -> None:
    settings = PolicySettings(adv_estimator="own_with_values", critic=CriticSettings())
    assert settings.own_estimator is with_values


@pytest.mark.parametrize(
    "decorator", [advantage_estimator("grpo"), advantage_estimator("gdpo"), policy_loss("vanilla")]
)
def test_a_name_of_verl_is_taken(decorator: Any) -> None:
    with pytest.raises(ConfigError, match="verl has a"):
        decorator(loss)


def test_a_name_is_given_once_but_a_notebook_cell_may_be_run_again() -> None:
    scope: dict[str, Any] = {}
    exec("def again(log_prob):\n    return 1", scope)
    exec("def other(log_prob):\n    return 2", scope)
    first = scope["again"]
    policy_loss("own_again")(first)
    exec("def again(log_prob):\n    return 3", scope)
    policy_loss("own_again")(scope["again"])
    assert PolicySettings(loss_mode="own_again").own_loss is scope["again"]
    with pytest.raises(ConfigError, match="again is the policy loss 'own_again' already"):
        policy_loss("own_again")(scope["other"])


def test_a_function_that_asks_for_what_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="asks for entropies; there is: old_log_prob, log_prob"):
        policy_loss("own_asking")(lambda log_prob, entropies: log_prob)


def test_the_decorators_are_offered_by_the_package() -> None:
    import raylight as rl

    assert rl.advantage_estimator is advantage_estimator
    assert rl.policy_loss is policy_loss


def test_an_estimator_declares_its_baseline() -> None:
    def of_groups(token_level_rewards: Any, index: Any) -> Any:
        return token_level_rewards

    def of_greedy_rollouts(token_level_rewards: Any, reward_baselines: Any) -> Any:
        return token_level_rewards - reward_baselines[:, None]

    advantage_estimator("own_of_groups", baseline_kind="group")(of_groups)
    advantage_estimator("own_greedy")(of_greedy_rollouts)
    algorithm = PolicyAlgorithm(model="m", adv_estimator="own_greedy")
    assert (algorithm.baseline_kind, algorithm.needs_greedy_rollouts) == ("greedy", True)
    assert PolicySettings(adv_estimator="own_of_groups").baseline_kind == "group"
    assert PolicySettings(adv_estimator="own_plain").baseline_kind == "none"
    with pytest.raises(ConfigError, match="baseline_kind='batch' and a parameter reward_baselines"):
        advantage_estimator("own_wrong", baseline_kind="batch")(of_greedy_rollouts)
    with pytest.raises(ConfigError, match="baseline_kind='greedy' and no parameter reward_baselines"):
        advantage_estimator("own_wrong", baseline_kind="greedy")(of_groups)
