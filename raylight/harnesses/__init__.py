"""Agents that are commands: coding harnesses and other programs, each with what it needs to be trained."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
