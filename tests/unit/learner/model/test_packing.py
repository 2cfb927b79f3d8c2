"""Models that cannot be packed are those with layers that keep a state, in each class of transformers."""

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raylight.learner.model.packing import PACKED_MODELS, STATE_MODELS, can_pack, keeps_state


@pytest.mark.parametrize(
    ("config", "keeps"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, True),
        ({"model_type": "lfm2", "layer_types": ["full_attention"]}, False),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, True),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"]}, False),
        ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"]}, True),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, True),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention", "full_attention"]}, False),
        ({"model_type": "rwkv"}, True),
        ({"model_type": "gpt2", "layer_types": None}, False),
        ({}, False),
    ],
)
def test_a_state_is_known_by_the_layers_or_the_type(config: dict, keeps: bool) -> None:
    assert keeps_state(config) == keeps
    assert not (keeps and can_pack(config))


def test_no_model_is_in_both_lists() -> None:
    assert not PACKED_MODELS & STATE_MODELS


@pytest.mark.slow
def test_every_class_with_a_state_in_transformers_is_known() -> None:
    """transformers marks classes whose cache cannot be cropped; their layers keep a state."""
    from transformers import AutoModelForCausalLM

    unknown = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind.startswith("musicgen"):
            continue  # has no configuration without other models
        config = CONFIG_MAPPING[kind]()
        stateful = AutoModelForCausalLM._model_mapping[type(config)]._is_stateful
        if stateful and not keeps_state(config.get_text_config().to_dict()):
            unknown.append(kind)
    assert not unknown
