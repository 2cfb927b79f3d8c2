"""Tracing of agents, and conversion of recorded spans to rewards, messages, triplets and text."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
