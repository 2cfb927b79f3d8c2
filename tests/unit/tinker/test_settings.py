"""A loss may stand in for `stable_reinforce`, if the server's settings name it."""

import pytest

from raylight.errors import ConfigError
from raylight.http.errors import RequestError
from raylight.tinker.serve import TinkerConfig
from raylight.tinker.settings import TinkerSettings


def test_a_loss_stands_in_for_stable_reinforce_only_by_choice() -> None:
    strict = TinkerSettings("m", 10, 8)
    assert strict.resolve_loss("stable_reinforce") == "stable_reinforce"
    with pytest.raises(RequestError, match="start the server with --stable-reinforce ppo"):
        strict.check_stability_info()
    lenient = TinkerSettings("m", 10, 8, stable_reinforce="ppo")
    assert (lenient.resolve_loss("stable_reinforce"), lenient.resolve_loss("cispo")) == ("ppo", "cispo")
    lenient.check_stability_info()


def test_only_losses_with_its_inputs_can_stand_in() -> None:
    assert TinkerConfig(stable_reinforce="dro").stable_reinforce == "dro"
    for loss in ("gspo", "cross_entropy", "stable_reinforce", "many"):
        with pytest.raises(ConfigError, match="choose importance_sampling, ppo, cispo, dro"):
            TinkerConfig(stable_reinforce=loss)
