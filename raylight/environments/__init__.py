"""Adapters for third-party environments and tools."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
