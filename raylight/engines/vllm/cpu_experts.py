"""Repair of mixture-of-experts layers on a CPU, which vLLM 0.29 does not repack after an update."""

from __future__ import annotations

import functools
from typing import Any


def repair_expert_updates() -> None:
    """Repack the experts after every update, as vLLM does after the first load.

    Its grouped matrix product on a CPU reads a layout of its own. vLLM 0.29.0 converts the weights to it at
    the first load only, and computes with unconverted ones after `reload_weights` or a weight transfer,
    without an error. On other platforms the function does nothing.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    original = UnquantizedFusedMoEMethod._setup_kernel
    if not current_platform.is_cpu() or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel
