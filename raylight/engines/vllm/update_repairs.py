"""Repairs of weight updates in vLLM 0.29, made once in each of its workers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

OUTPUT_LAYER = "lm_head"


def repair_expert_updates() -> None:
    """Repack a layer's experts after every update, as vLLM does after the first load.

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


def ignore_tied_output(model: Any) -> None:
    """Drop the output layer from updates of a model that has none of its own.

    It is sent although it is tied, because vLLM on a CPU keeps a repacked copy of it. Some models of vLLM
    compute with the embedding instead, and reject the name.
    """
    if any(name.rpartition(".")[2] == OUTPUT_LAYER for name, _ in model.named_modules()):
        return
    load = model.load_weights

    @functools.wraps(load)
    def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
        return load(
            (name, tensor) for name, tensor in weights if name.split(".")[-2:] != [OUTPUT_LAYER, "weight"]
        )

    model.load_weights = load_weights
