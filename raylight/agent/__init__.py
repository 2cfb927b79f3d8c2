"""Tools for writing agents: agent classes, resources, emitters and hooks."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
