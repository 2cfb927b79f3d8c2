"""Repairs of vLLM's weight updates that need no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raylight.engines.vllm.update_repairs import ignore_tied_output


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
    ignore_tied_output(model)
    assert model.load_weights((name, torch.zeros(1)) for name in NAMES) == set(expected)
    assert model.loaded == expected
