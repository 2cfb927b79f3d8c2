"""Typed errors. Every message says what happened and what to do next.

An error carries one string, so that it survives pickling through Ray unchanged.
"""

from __future__ import annotations


class RaylightError(Exception):
    """Base of every error that raylight raises on purpose."""


class ConfigError(RaylightError):
    """A setting is unknown, missing, or contradicts another one."""


class DatasetError(RaylightError):
    """A dataset is empty or cannot be read."""


class ModelNotFoundError(RaylightError):
    """A model path does not hold a model that transformers can load."""


class AgentSignatureError(RaylightError):
    """A rollout function asks for a parameter that nothing can fill."""


class RewardError(RaylightError):
    """An agent returned something that is not a reward."""


class EmptyTraceError(RaylightError):
    """A rollout to be trained on made no call to the model being trained."""


class RolloutsFailedError(RaylightError):
    """Every rollout of a batch failed, so that there is nothing to learn from."""


class PlacementError(RaylightError):
    """The cluster cannot place what was asked for within the deadline."""


class PortInUseError(RaylightError):
    """The HTTP port that serving should listen on is taken."""


class EngineStartError(RaylightError):
    """The serving deployment did not come up."""


class RunnerLostError(RaylightError):
    """Runner actors died more often than the run allows."""


class StoreLostError(RaylightError):
    """The store actor died, and with it the state of the run."""


class UnknownRolloutError(RaylightError):
    """The store has no rollout or attempt of this id."""


class InvalidTransitionError(RaylightError):
    """A status change that the state tables do not have."""


class WeightSyncError(RaylightError):
    """New weights did not reach every engine within the deadline, or did not fit it."""


class MismatchError(RaylightError):
    """Log-probabilities of engine and learner differ by more than the allowed amount."""


class NonFiniteGradientError(RaylightError):
    """The gradient was not finite several steps in a row."""


class LearnerError(RaylightError):
    """A learner rank died or failed."""
