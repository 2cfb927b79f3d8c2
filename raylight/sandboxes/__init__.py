"""Places in which the programs of agents run: local processes, containers, other machines."""

from raylight import _lazy_names

__all__, __getattr__, __dir__ = _lazy_names(__name__)
