"""Rewards of groups of rollouts: relative ranking, rubrics, terms, and their sums."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
