"""Repairs of vLLM 0.29, made once in each of its workers: of weight updates, and of the routes of experts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

OUTPUT_LAYER = "lm_head"
PREFIXING = frozenset({"BloomForCausalLM"})
"""Models of vLLM that put the name of their transformer before every name that has none."""


def repair_expert_updates() -> None:
    """Repack a layer's experts after every update, as vLLM does after the first load.

    Its grouped matrix product on a CPU reads another layout. vLLM 0.29.0 converts the weights to it at
    the first load only, and computes with unconverted ones after `reload_weights` or a weight transfer,
    without an error. On other platforms the function does nothing.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    original = UnquantizedFusedMoEMethod._setup_kernel
    if not current_platform.is_cpu() or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def setup_kernel(self: UnquantizedFusedMoEMethod, layer: object, w13: object, w2: object) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def load_tied_output(model: Any) -> None:
    """Have updates of the output layer reach a model that ties it to the embedding.

    It is sent although it is tied, because vLLM on a CPU keeps a repacked copy of it. Some models of vLLM
    compute with the embedding instead, and reject the name: it is dropped there. Others look for it below
    their transformer.
    """
    modules = dict(model.named_modules())
    own = modules.get(OUTPUT_LAYER)
    is_nested = any(name.endswith(f".{OUTPUT_LAYER}") for name in modules)
    if is_nested or (own is not None and type(model).__name__ not in PREFIXING):
        return
    load = model.load_weights

    @functools.wraps(load)
    def load_weights(weights: Iterable[tuple[str, object]]) -> object:
        output: list[object] = []

        def others() -> Iterator[tuple[str, object]]:
            for name, tensor in weights:
                if name.split(".")[-2:] == [OUTPUT_LAYER, "weight"]:
                    output.append(tensor)
                else:
                    yield name, tensor

        loaded = load(others())
        if own is not None:
            for tensor in output:
                own.weight.weight_loader(own.weight, tensor)
                loaded.add(f"{OUTPUT_LAYER}.weight")
        return loaded

    model.load_weights = load_weights


def capture_routes_on_cpu() -> None:
    """Record the chosen experts in vLLM's kernel for CPUs, as `enable_return_routed_experts` asks.

    vLLM 0.29 captures them on GPUs only, and refuses to start on a CPU. On other platforms the function does
    nothing.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    choose = Experts._select_experts
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def select_experts(self: Experts, *args: object) -> tuple[object, object]:
        weights, chosen = choose(self, *args)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(chosen)
        return weights, chosen

    Experts._select_experts = select_experts
    Experts.supports_routing_replay_capture = lambda self: True
