"""Repairs of vLLM's weight updates that need no vLLM."""

from typing import Any

import pytest
import torch

from raylight.engines.vllm.update_repairs import load_tied_output


class Model(torch.nn.Module):
    """A model that records the names that it loads."""

    def __init__(self, *layers: str) -> None:
        super().__init__()
        for layer in layers:
            self.add_module(layer, torch.nn.Identity())
        self.loaded: list[str] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded = [name for name, _ in weights]
        return set(self.loaded)


NAMES = ["embed_tokens.weight", "lm_head.weight", "lm_head.bias"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(["embed_tokens", "lm_head"], NAMES), (["embed_tokens"], ["embed_tokens.weight", "lm_head.bias"])],
)
def test_a_tied_output_layer_is_dropped_where_there_is_none(layers: list[str], expected: list[str]) -> None:
    model = Model(*layers)
    load_tied_output(model)
    assert model.load_weights((name, torch.zeros(1)) for name in NAMES) == set(expected)
    assert model.loaded == expected


class BloomForCausalLM(Model):
    """A model that puts its transformer's name before other names."""

    def __init__(self) -> None:
        super().__init__("word_embeddings")
        self.lm_head = torch.nn.Linear(1, 1)
        self.lm_head.weight.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)


def test_the_output_layer_is_loaded_apart_where_names_get_a_prefix() -> None:
    model = BloomForCausalLM()
    load_tied_output(model)
    weights = [("word_embeddings.weight", torch.zeros(1)), ("lm_head.weight", torch.full((1, 1), 7.0))]
    assert model.load_weights(weights) == {"word_embeddings.weight", "lm_head.weight"}
    assert model.loaded == ["word_embeddings.weight"]
    assert model.lm_head.weight.item() == 7.0
