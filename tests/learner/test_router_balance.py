"""The load-balancing loss of routers equals that of transformers, however rows are divided."""

from __future__ import annotations

import pytest
import router_balance_ranks
from rank_processes import run_ranks
from router_balance_ranks import balance, plain_balance
from tiny_models import build_model

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import OptimizerSettings
from raylight.learner.model.verl_engines import build_policy, build_reward_model

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"packed": True}),
        ("qwen3_moe", {"gradient_checkpointing": True}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("olmoe", {}),
    ],
)
def test_loss_and_gradient_are_those_of_transformers(model_type, config, tmp_path):
    model = build_model(model_type, tmp_path)
    assert balance(model, **config) == pytest.approx(plain_balance(model), rel=1e-5)


def test_passes_are_averaged_by_their_tokens(tmp_path):
    """The loss is not linear in the tokens, so that several passes only come near the loss of one."""
    model = build_model("qwen3_moe", tmp_path)
    found, plain = balance(model, max_tokens_per_micro_batch=64), plain_balance(model)
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.05)
    assert found != pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_ranks_do_not_change_it(tmp_path):
    model = build_model("qwen3_moe", tmp_path / "model")
    shared = run_ranks(router_balance_ranks.main, 2, model)
    assert shared[0] == pytest.approx(plain_balance(model), rel=1e-5)
    assert shared[1] == shared[0]


def test_what_has_no_such_loss_is_refused(tmp_path):
    coef = LearnerConfig(router_aux_loss_coef=0.1)
    dense = build_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="transformers has no load-balancing loss of Qwen3ForCausalLM"):
        build_policy(dense, coef, OptimizerSettings(), 1)
    with pytest.raises(
        ConfigError, match=r"nothing reads learner\.router_aux_loss_coef=0\.1 in the training"
    ):
        build_reward_model(dense, coef, OptimizerSettings(), 1)
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef=0\.1 cannot be computed by ranks that share"
    ):
        LearnerConfig(router_aux_loss_coef=0.1, n=2, ulysses=2, packed=True)
