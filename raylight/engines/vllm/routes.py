"""Routes of a mixture of experts, which vLLM's workers capture with `enable_return_routed_experts`."""

from __future__ import annotations

import functools


def capture_routes_on_cpu() -> None:
    """Record the chosen experts in vLLM's kernel for CPUs.

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
