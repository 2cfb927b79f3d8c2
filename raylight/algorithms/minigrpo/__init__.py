"""MiniGRPO: one process that samples, trains an adapter and serves it, for a small GPU or a CPU."""

from raylight.algorithms.minigrpo.algorithm import MiniGRPO

__all__ = ["MiniGRPO"]
