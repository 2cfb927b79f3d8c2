"""Algorithms: they turn rollouts into a better agent."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
