"""Linear layers on CPUs with AVX-512.

torch multiplies float32 matrices with MKL, which uses only AVX2 on AMD's processors. oneDNN's kernels, which
torch has too, are twice as fast there.
"""

from __future__ import annotations

import torch

MIN_PRODUCTS = 2**20
"""Multiplications of a layer's pass from which oneDNN is faster; a call of it costs 10 microseconds more."""


def use_fast_linear(module: torch.nn.Module) -> None:
    """Have the float32 linear layers of a module on a CPU computed by the faster kernels, if there are any.

    The results differ from those of torch's own by rounding.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return
    for layer in module.modules():
        if type(layer) is torch.nn.Linear and layer.weight.dtype == torch.float32:
            layer.__class__ = FastLinear


class FastLinear(torch.nn.Linear):
    """A linear layer whose large products oneDNN computes on a CPU, if no gradient is needed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if (
            input.numel() * len(weight) < MIN_PRODUCTS
            or input.device.type != "cpu"
            or input.dtype != torch.float32
            or torch.is_grad_enabled()
        ):
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1])
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product.view(*input.shape[:-1], len(weight))
