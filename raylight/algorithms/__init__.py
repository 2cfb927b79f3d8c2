"""Algorithms: what turns rollouts into a better agent."""

from raylight.algorithms.policy import GRPO, PolicyAlgorithm

__all__ = ["GRPO", "PolicyAlgorithm"]
