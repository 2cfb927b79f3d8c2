"""Starter models: small seeded models for a family of tasks, which reinforcement learning improves on a CPU.

A random model never earns a reward and a perfect one has nothing left to learn. A starter model learns from
demonstrations of a teacher until about half of its answers are right.
"""
