"""Sizes of models of architectures whose configurations differ from the usual one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from raylight.trainer.cluster_fit.model_shape import measure_activations, measure_prefill, read_shape

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
MODELS = {
    "mamba": {"state_size": 4},  # no attention, and types of layers that follow from their number
    "bloom": {"n_head": 2},  # eager attention only
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_without_the_usual_attention_is_measured(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type, **SMALL | MODELS[model_type]).save_pretrained(tmp_path)
    path = str(tmp_path)
    shape = read_shape(path)
    assert shape.hidden == 32
    assert (shape.cache_per_token == 0) == (model_type == "mamba")
    assert measure_activations(path, 1, 16, torch.float32).total(shape.layers) > 0
    assert measure_prefill(path, 1, 16, torch.float32) > 0
