"""The faster linear layers compute what torch's own compute, with the same gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from raylight.engines.transformers.linear import FastLinear

SHAPES = [(64, 448, 320), (2, 16, 8)]
"""Rows, inputs and outputs of a large product, and of one that torch computes."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_results_and_gradients_are_those_of_torch(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    fast = copy.deepcopy(plain)
    fast.__class__ = FastLinear
    given = [torch.randn(2, rows // 2, inputs, requires_grad=True) for _ in range(2)]
    given[1].data.copy_(given[0].data)
    results = [layer(x) for layer, x in zip((plain, fast), given, strict=True)]
    for result in results:
        (result**2).sum().backward()
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-4, atol=1e-4)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)


def test_only_what_is_trained_gets_a_gradient() -> None:
    layer = torch.nn.Linear(448, 320)
    layer.__class__ = FastLinear
    layer.weight.requires_grad_(False)
    x = torch.randn(64, 448)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((320,), 64.0))
