"""MiniGRPO: GRPO in one process that serves, samples and trains an adapter, for a small GPU or a CPU."""

from raylight.algorithms.minigrpo.algorithm import MiniGRPO

__all__ = ["MiniGRPO"]
