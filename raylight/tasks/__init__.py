"""Sets of training tasks: lists, mixtures, curricula, stages and streams."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
