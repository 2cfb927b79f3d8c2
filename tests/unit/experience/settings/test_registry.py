"""Registry of estimators and losses: resolution, validation, and transport to the ranks."""

from typing import Any

import cloudpickle
import pytest

from raylight.algorithms import PolicyAlgorithm
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.experience.settings.registry import advantage_estimator, policy_loss


@advantage_estimator("own_plain")
def plain(token_level_rewards: Any, response_mask: Any) -> Any:
    return token_level_rewards


@advantage_estimator("own_with_values")
def with_values(token_level_rewards: Any, values: Any, **more: Any) -> Any:
    return token_level_rewards - values


@policy_loss("own_loss")
def loss(log_prob: Any, advantages: Any, config: Any = None) -> Any:
    return -log_prob * advantages


def test_a_function_is_pickled_with_the_settings_that_name_it() -> None:
    algorithm = PolicyAlgorithm(model="m", adv_estimator="own_plain", loss_mode="own_loss")
    settings = PolicySettings(**{name: getattr(algorithm, name) for name in PolicySettings.model_fields})
    there = cloudpickle.loads(cloudpickle.dumps(settings))
    assert there.user_estimator(3, None) == 3
    assert there.user_loss(2, 4) == -8
    assert (PolicySettings().user_estimator, PolicySettings().user_loss) == (None, None)


def test_a_function_of_main_is_pickled_by_value() -> None:
    """The functions of a script or a notebook cannot be imported by another process."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("def mine(token_level_rewards):\n    return token_level_rewards + 1", scope)
    advantage_estimator("own_main")(scope["mine"])
    sent = cloudpickle.dumps(PolicySettings(adv_estimator="own_main"))
    assert b"token_level_rewards" in sent
    assert cloudpickle.loads(sent).user_estimator(1) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adv_estimator": "gropo"}, "unknown adv_estimator 'gropo'; choose from: grpo"),
        ({"adv_estimator": "own_plian"}, "choose from: own_plain"),
        ({"loss_mode": "gspoo"}, "unknown loss_mode 'gspoo'; choose from: gspo"),
        ({"adv_estimator": "gdpo"}, "name them in reward_weights"),
        ({"adv_estimator": "gdpo", "reward_weights": {}}, "reward_weights"),
        ({"adv_estimator": "gdpo", "reward_weights": {"a": float("nan")}}, "reward_weights"),
        (
            {"adv_estimator": "gdpo", "reward_weights": {"a": 1.0}, "kl_reward_coef": 0.1},
            "kl_reward_coef has no effect",
        ),
        (
            {"adv_estimator": "gdpo", "reward_weights": {"a": 1.0}, "turn_rewards": True},
            "set turn_rewards=False",
        ),
        ({"reward_weights": {"a": 1.0}}, "reward_weights .read with adv_estimator gdpo"),
        ({"loss_mode": "dro"}, "set dro_beta"),
        ({"loss_mode": "dro", "dro_beta": 0.0}, "dro_beta"),
        ({"loss_mode": "clip_cov", "clip_cov_ratio": 0.0}, "clip_cov_ratio.*greater than 0"),
        ({"dro_beta": 0.1}, "dro_beta .read with loss_mode dro"),
        ({"adv_estimator": "optimal_token_baseline", "bypass_mode": True}, "set bypass_mode=False"),
        (
            {"adv_estimator": "optimal_token_baseline", "max_staleness": 1, "proximal": "loglinear"},
            "set proximal='recompute'",
        ),
        ({"loss_mode": "bypass_mode"}, "it is a setting here: bypass_mode=True"),
        ({"adv_estimator": "own_with_values"}, "a critic need each other"),
        ({"adv_estimator": "own_plain", "critic": CriticSettings()}, "a critic need each other"),
    ],
)
def test_an_invalid_algorithm_raises_before_the_run_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyAlgorithm(model="m", **given)


def test_an_estimator_with_values_needs_a_critic() -> None:
    settings = PolicySettings(adv_estimator="own_with_values", critic=CriticSettings())
    assert settings.user_estimator is with_values


@pytest.mark.parametrize(
    "decorator", [advantage_estimator("grpo"), advantage_estimator("gdpo"), policy_loss("vanilla")]
)
def test_names_of_verl_cannot_be_registered(decorator: Any) -> None:
    with pytest.raises(ConfigError, match=r"is already a .* of verl"):
        decorator(loss)


def test_a_name_is_unique_but_a_notebook_cell_may_run_twice() -> None:
    scope: dict[str, Any] = {}
    exec("def again(log_prob):\n    return 1", scope)
    exec("def other(log_prob):\n    return 2", scope)
    first = scope["again"]
    policy_loss("own_again")(first)
    exec("def again(log_prob):\n    return 3", scope)
    policy_loss("own_again")(scope["again"])
    assert PolicySettings(loss_mode="own_again").user_loss is scope["again"]
    with pytest.raises(ConfigError, match=r"the policy loss 'own_again' is already .*again"):
        policy_loss("own_again")(scope["other"])


def test_unknown_parameters_raise() -> None:
    with pytest.raises(
        ConfigError, match="unknown parameters: entropies; it may have: old_log_prob, log_prob"
    ):
        policy_loss("own_asking")(lambda log_prob, entropies: log_prob)


def test_the_decorators_are_public() -> None:
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
