"""Typed errors. Every message says what happened and what to do next.

An error carries one string, so that it survives pickling through Ray unchanged.
"""

from __future__ import annotations

import re


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


class RowTooLongError(RaylightError):
    """A trajectory is longer than a learner takes, and no rule says what becomes of it."""


class GreedyError(RaylightError):
    """A rollout that should have taken the most probable tokens sampled others."""


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


class StoreError(RaylightError):
    """The store's file cannot be opened, read or written."""


class UnknownIdError(RaylightError, ValueError):
    """The store has no rollout, attempt, resources or worker of this id."""


class WorkerGoneError(RaylightError):
    """A worker that the store has released asks for rollouts."""


class QueryError(RaylightError, ValueError):
    """A query asks for an order, a page or a logic that there is not."""


class SpanError(RaylightError, ValueError):
    """A span holds something that cannot be stored."""


class InvalidTransitionError(RaylightError):
    """A status change that the state tables do not have."""


class WeightSyncError(RaylightError):
    """New weights, or another order, did not reach every engine within the deadline, or did not fit it."""


class CoordinatorUnavailableError(WeightSyncError):
    """The engines' board did not answer; it may do so when asked again."""


class CoordinatorLostError(WeightSyncError):
    """The engines' board died, and with it what they are to do."""


class MismatchError(RaylightError):
    """Log-probabilities of engine and learner differ by more than the allowed amount."""


class NonFiniteGradientError(RaylightError):
    """The gradient was not finite several steps in a row."""


class LearnerError(RaylightError):
    """A learner rank failed; ranks that are started anew would fail alike."""


class LearnerLostError(LearnerError):
    """A learner rank died, hung, or lost the others; the ranks can be started anew, all together, and go on."""


class LearnerMemoryError(LearnerError):
    """A learner rank ran out of memory, and would do so again with the same settings."""


class DeviceMemoryError(RaylightError):
    """The device has less memory than a run needs."""


class CheckpointError(RaylightError):
    """A training state cannot be written, read, or put into this model."""


class PromptError(RaylightError):
    """A prompt template cannot be rendered: its text is malformed, or a value is missing."""


class CriticError(RaylightError):
    """The models that criticise and rewrite prompts do not answer."""


class EmitError(RaylightError):
    """An emitter was given something that a span cannot hold, or a span holds something that cannot be read."""


class HookError(RaylightError):
    """A hook cannot be called as it is written, or a strict hook failed."""


class TracerError(RaylightError):
    """This process cannot be traced as it was asked for."""


class OtlpError(RaylightError):
    """A body sent to `/v1/traces` cannot be read.

    Args:
        message: what is wrong with it.
        status: HTTP status of the answer: 400 malformed, 413 too large, 415 a type or coding that is not known.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def reason_of(error: BaseException) -> str:
    """The line of a Ray error that tells what happened: the innermost exception's, or else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inner = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (inner[-1] if inner else lines[0] if lines else type(error).__name__).rstrip(".")
