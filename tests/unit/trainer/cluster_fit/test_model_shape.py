"""Sizes of models of architectures whose configurations differ from the usual one."""

from pathlib import Path

import pytest
import torch
from tiny_vlms import build_vlm
from transformers import AutoConfig, AutoModelForCausalLM

from raylight.config import EngineConfig, LearnerConfig, LoraConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.model.vision import FEATURE_BYTES
from raylight.trainer.cluster_fit.local_memory import TensorMemoryCounter, estimate_memory
from raylight.trainer.cluster_fit.model_shape import (
    _traced_peak,
    adapter_parameters,
    measure_activations,
    measure_prefill,
    read_config,
    read_shape,
)
from raylight.trainer.cluster_fit.role_needs import learner_memory

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
MODELS = {
    "mamba": {"state_size": 4},  # no attention, and types of layers that follow from their number
    "bloom": {"n_head": 2},  # eager attention only
}


@pytest.mark.parametrize("model_type", ["bloom", pytest.param("mamba", marks=pytest.mark.slow)])
def test_a_model_without_the_usual_attention_is_measured(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type, **SMALL | MODELS[model_type]).save_pretrained(tmp_path)
    path = str(tmp_path)
    shape = read_shape(path)
    assert shape.hidden == 32
    assert (shape.cache_per_token == 0) == (model_type == "mamba")
    assert measure_activations(path, 1, 16, torch.float32, shape.layers) > 0
    assert measure_prefill(path, 1, 16, torch.float32) > 0


LAYERED = {
    "qwen2": {},
    "gemma2": {"head_dim": 16},  # every second layer has a window
    "deepseek_v3": {  # the first layers are dense
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
    },
    "gemma3n_text": {  # the last layers share keys and values, the first have sparse activations
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "activation_sparsity_pattern": [0.9] * 2 + [0.0] * 6,
    },
    "mamba": {"state_size": 4},
}


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", LAYERED)
def test_few_layers_show_the_activations_of_all(model_type: str, checkpointing: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    settings = sizes | {"vocab_size": 50_000, "num_key_value_heads": 4} | LAYERED[model_type]
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    whole = _traced_peak(str(tmp_path), 8, 2, 16, torch.bfloat16, checkpointing)
    found = measure_activations(str(tmp_path), 2, 16, torch.bfloat16, 8, checkpointing)
    assert found == pytest.approx(whole, rel=0.01)


def test_experts_that_read_their_numbers_of_tokens_are_estimated(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("granitemoe", vocab_size=64, **sizes, **experts)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    with TensorMemoryCounter() as counter:
        for parameter in model.parameters():
            counter.ignore(parameter)
        states = model.model(torch.zeros(2, 256, dtype=torch.long), use_cache=False)[0]
        kept = counter.now
    assert states.requires_grad
    found = measure_activations(str(tmp_path), 2, 256, torch.float32, 4)
    assert found == pytest.approx(kept, rel=0.35)
    assert measure_prefill(str(tmp_path), 2, 256, torch.float32) == found // 4


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_vision_part_is_counted(family: str, tmp_path: Path) -> None:
    path = build_vlm(family, tmp_path)
    shape = read_shape(path)
    assert 0 < shape.vision < shape.parameters / 2
    assert shape.pixel_bytes > 150  # a patch has 192 bytes in float32
    assert measure_activations(path, 1, 16, torch.float32, shape.layers) > 0
    settings, learner = PolicySettings(), LearnerConfig(n=2)
    trained = learner.model_copy(update={"train_vision": True})
    frozen, whole = (
        {item.name: item.size for item in learner_memory(path, shape, config, settings).items}
        for config in (learner, trained)
    )
    assert frozen["frozen vision part"] == shape.vision * 4
    assert whole["policy optimizer"] - frozen["policy optimizer"] == shape.vision * 4
    width = shape.hidden * 4
    assert frozen["features of images"] == FEATURE_BYTES + 16384 * width
    assert "features of images" not in whole
    judged = PolicySettings(kl_coef=0.1).with_local_teachers([path])
    sizes = {item.name: item.size for item in learner_memory(path, shape, trained, judged).items}
    assert sizes["frozen vision part"] == 2 * shape.vision * 4  # of the initial model and the teacher
    assert sizes["policy weights"] == whole["policy weights"]
    for name in ("reference weights", "teacher weights"):
        assert sizes[name] == (shape.parameters - shape.vision) * 2
    reference = learner_memory(path, shape, learner, PolicySettings(kl_coef=0.1), longest=64, rollouts=8)
    sizes = {item.name: item.size for item in reference.items}
    assert sizes["features of images"] == 2 * (8 * 64 + 16384) * width  # of two models
    assert frozen["pixels"] == 16384 * shape.pixel_bytes
    lora = learner.model_copy(update={"n": 1, "lora": LoraConfig(rank=4)})
    estimate = estimate_memory(read_config(path), EngineConfig(max_model_len=64), lora, reads_images=True)
    assert estimate.trained == 4 * adapter_parameters(path, LoraConfig(rank=4))
