"""Flat keys of losses and advantage estimators, as verl and version 0.2 have them."""

from typing import Any

import pytest

import raylight as rl
from raylight import algorithms
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import TABLES, PolicySettings
from raylight.trainer.spec.run_file import build_algorithm

NAMES = [
    "GRPO", "PPO", "CISPO", "DAPO", "DPPO", "DRO", "DrGRPO", "GDPO", "GMPO", "GPG", "GSPO", "OPO", "OTB",
    "RLOO", "ReMax", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "SAPO", "ClipCov", "KLCov",
]  # fmt: skip


def made(name: str, **settings: Any) -> Any:
    weights = {"reward_weights": {"a": 1.0}} if name == "GDPO" else {}
    return getattr(rl if name in ("GRPO", "PPO") else algorithms, name), {"model": "m"} | weights | settings


def flat_form(settings: dict[str, Any]) -> dict[str, Any]:
    """Return resolved settings as version 0.2 wrote them: every key of every variant, in one level."""
    flat = dict(settings)
    for table in TABLES:
        variant = flat.pop(table.field)
        keys = {key: table.default_of(key) for key in table.flat_keys - {table.selector}}
        own = {key: value for key, value in variant.items() if key != "name"}
        flat |= keys | own | {table.selector: variant["name"]}
    return flat


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_of_version_0_2_is_built(name: str) -> None:
    cls, settings = made(name)
    today = cls(**settings)
    before = flat_form(today.arguments())
    again = build_algorithm({"name": name, **before})
    assert (again.loss, again.advantage) == (today.loss, today.advantage)


@pytest.mark.parametrize(
    ("name", "settings", "loss"),
    [
        (
            "GSPO",
            {"loss": {"clip_ratio_low": 0.1}},
            {"name": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 4e-4},
        ),
        (
            "DAPO",
            {"loss": {"name": "vanilla", "clip_ratio_low": 0.1}},
            {"clip_ratio_high": 0.28, "clip_ratio_c": 10},
        ),
        ("DAPO", {"loss_mode": "gspo"}, {"name": "gspo", "clip_ratio_high": 0.28}),
        ("DAPO", {"loss_mode": "gpg", "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, {"name": "gpg"}),
        ("GRPO", {"loss": {"clip_ratio_low": 0.1}, "clip_ratio_high": 0.3}, {"clip_ratio_high": 0.3}),
        ("GRPO", {"loss": rl.losses.ClipCovLoss(clip_cov_ratio=1e-3)}, {"clip_cov_ratio": 1e-3}),
    ],
)
def test_what_an_algorithm_sets_holds_where_the_user_sets_nothing(
    name: str, settings: dict[str, Any], loss: dict[str, Any]
) -> None:
    cls, given = made(name, **settings)
    assert loss.items() <= cls(**given).loss.model_dump().items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": rl.losses.ClipCovLoss(), "loss_mode": "gspo"},
            "loss_mode is 'gspo', and loss is 'clip_cov'",
        ),
        (
            {"loss": rl.losses.ClipCovLoss(clip_cov_ratio=1e-3), "clip_cov_ratio": 2e-3},
            "clip_cov_ratio is 0.002, and 0.001 in loss",
        ),
        ({"clip_ratio_high": None}, "clip_ratio_high"),
        ({"loss_mode": 3}, "loss_mode must be a name"),
        ({"loss": 3, "clip_ratio_high": 0.3}, "loss must be a policy loss"),
        ({"adv_estimator": ["grpo"]}, "adv_estimator must be a name"),
        ({"adv_estimator": "rloo"}, "'rloo' is not GRPO's"),
        ({"clip_ratio_hig": 0.3}, "it has: clip_ratio_high"),
        ({"loss": {"name": "gspo", "clip_cov_ratio": 1e-3}}, "clip_cov_ratio"),
        ({"clip_cov_ratio": 1e-3}, "nothing reads clip_cov_ratio"),
    ],
)
def test_contradictions_and_wrong_types_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.GRPO(model="m", **settings)
    with pytest.raises(ConfigError, match=message):
        build_algorithm({"name": "GRPO", "model": "m", **settings})


def test_weights_of_rewards_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="name them in reward_weights"):
        algorithms.GDPO(model="m")
    assert PolicySettings(advantage={"name": "gdpo", "reward_weights": {"a": 1.0}}).reward_weights == {
        "a": 1.0
    }


def test_trl_reads_clip_ratios() -> None:
    trl = rl.MiniGRPO(
        model="m", backend="trl", prompt_of=str, reward_of=lambda task, text: 0.0, clip_ratio_high=0.3
    )
    assert trl.loss.model_dump()["clip_ratio_high"] == 0.3
