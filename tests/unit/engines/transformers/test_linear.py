"""The faster linear layers compute what torch's own compute."""

import copy

import pytest
import torch

from raylight.engines.transformers.engine import FastLinear

SHAPES = [(64, 448, 320), (2, 16, 8)]
"""Rows, inputs and outputs of a large product, and of one that torch computes."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_results_are_those_of_torch(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    fast = copy.deepcopy(plain)
    fast.__class__ = FastLinear
    x = torch.randn(2, rows // 2, inputs)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)


def test_a_pass_with_gradients_is_that_of_torch() -> None:
    layer = torch.nn.Linear(448, 320)
    x = torch.randn(64, 448)
    expected = layer(x)
    layer.__class__ = FastLinear
    found = layer(x)
    assert torch.equal(found, expected)
    found.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((320,), 64.0))
