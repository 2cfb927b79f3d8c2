"""Layers that an adapter changes in mixtures of experts."""

from pathlib import Path

import pytest
from tiny_models import MOE, build_model

from raylight.config import LoraConfig
from raylight.errors import ConfigError
from raylight.learner.model.adapter import adapted_layers

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LINEAR_ATTENTION = {"in_proj_ba", "in_proj_qkvz", "out_proj"}


@pytest.mark.parametrize("model_type", MOE)
def test_by_default_experts_shared_experts_and_routers_are_left_out(model_type: str, tmp_path: Path) -> None:
    others = LINEAR_ATTENTION if model_type == "qwen3_next" else set()
    assert set(adapted_layers(build_model(model_type, tmp_path), LoraConfig())) == ATTENTION | others


@pytest.mark.parametrize("layers", [["gate_proj"], ["gate_proj", "up_proj"], ["down_proj"]])
def test_experts_cannot_be_adapted(layers: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which cannot be adapted|do not fit"):
        adapted_layers(build_model("qwen3_moe", tmp_path), LoraConfig(target_modules=layers))


def test_target_parameters_are_merged_for_the_engines_and_allow_no_dropout() -> None:
    names = ["mlp.experts.down_proj"]
    assert LoraConfig().serve == "adapter"
    assert LoraConfig(target_parameters=names).serve == "merged"
    with pytest.raises(ConfigError, match="no engine serves an adapter of target_parameters"):
        LoraConfig(target_parameters=names, serve="adapter")
    with pytest.raises(ConfigError, match=r"dropout=0\.1 cannot be applied to target_parameters"):
        LoraConfig(target_parameters=names, dropout=0.1)
