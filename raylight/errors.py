"""Typed errors. Every message says what is wrong, where, and what to do next.

Each error is constructed from one string, so that Ray can pickle it and rebuild it unchanged. An error that
rejects a value is a ValueError too, and a TypeError if the value's type is wrong.
"""

from __future__ import annotations

import re


class RaylightError(Exception):
    """Base class of every error that raylight raises on purpose."""


class ConfigError(RaylightError, ValueError):
    """A setting is unknown, missing, or contradicts another one."""


class DatasetError(RaylightError, ValueError):
    """A dataset is empty or cannot be read."""


class UnsupportedTaskError(DatasetError):
    """A task of a dataset needs what raylight does not have, such as several containers."""


class ModelNotFoundError(RaylightError):
    """A model path does not hold a model that transformers can load."""


class ImageError(RaylightError, ValueError):
    """An image cannot be read, fetched or found, or is beyond a limit."""


class AgentSignatureError(RaylightError, ValueError):
    """A rollout function has a required parameter that no argument or resource fills."""


class RewardError(RaylightError, ValueError):
    """An agent returned or emitted a value that is not a reward."""


class GroupRewardError(RaylightError):
    """A group reward returned something other than a reward for each rollout, or a conversation is longer
    than its reward model takes."""


class JudgeError(RaylightError):
    """A judge did not answer, or no answer could be read; its group is not scored, and counted."""


class RewardModelError(RaylightError):
    """A reward model gave no score: its chat template rejects a conversation, or a score is not finite. Its
    group is not scored, and counted."""


class RewardTypeError(RewardError, TypeError):
    """A reward is not a number."""


class CommandError(RaylightError):
    """The program of a `CommandAgent` cannot be started, or it failed."""


class CommandUnavailableError(CommandError):
    """The program of a `CommandAgent` reported by exit status 75 that a service failed; it is run again."""


class SandboxError(RaylightError):
    """A sandbox cannot be made or used as it is described."""


class SandboxUnavailableError(SandboxError):
    """A sandbox's backend failed for a reason that may pass; the attempt is retried."""


class EnvironmentServerError(RaylightError):
    """The server of an environment or of tools does not start, reports an error, or breaks its protocol."""


class EnvironmentUnavailableError(EnvironmentServerError):
    """The server of an environment or of tools is away or does not respond; the attempt is retried."""


class ToolTimeoutError(RaylightError):
    """A method of an environment took longer than its time limit."""


class EmptyTraceError(RaylightError):
    """Every rollout of a training batch failed before it called the model that is trained."""


class RowTooLongError(RaylightError):
    """A trajectory is longer than `learner.max_row_tokens`, and `long_rows` is "error"."""


class TeacherPromptError(RaylightError):
    """The prompt function of a teacher failed, returned no messages, or its messages cannot be rendered."""


class GreedyError(RaylightError):
    """A rollout that had to be sampled greedily was sampled at another temperature."""


class RolloutsFailedError(RaylightError):
    """Every rollout of a batch failed; there is nothing to train on."""


class ClusterStartError(RaylightError):
    """Ray did not start on this machine, or not in time."""


class ClusterLostError(RaylightError):
    """The Ray cluster ended during the run: its GCS, or the raylet of the driver's node. The run can be
    resumed on another cluster."""


class PlacementError(RaylightError):
    """The cluster did not provide the requested resources within the deadline."""


class PortInUseError(RaylightError):
    """The HTTP port for serving is in use by another process."""


class BrokenPackageError(RaylightError):
    """An installed package that transformers, verl or vLLM imports cannot be imported."""


class EngineStartError(RaylightError):
    """The serving deployment failed to start."""


class ServingLostError(RaylightError):
    """A served model, or the ingress in front of it, was away for longer than `engine.start_timeout_s`."""


class RunnerLostError(RaylightError):
    """The runner actors did not start, or died more often than `runner.max_restarts` allows."""


class ScaleError(RaylightError):
    """A run in progress did not reach the size that `raylight scale` asked for."""


class StoreLostError(RaylightError):
    """The store actor is gone for good; its file, and so the run, remains where `output_dir` remains."""


class StoreError(RaylightError):
    """The store's file cannot be opened, read or written."""


class DiskError(StoreError):
    """A file of the run cannot be written: its disk is full or read-only, or its folder was removed."""


class UnknownIdError(RaylightError, ValueError):
    """The store has no rollout, attempt, resources or worker with this id."""


class WorkerGoneError(RaylightError):
    """A worker asks for rollouts after the store has released it and requeued its attempts."""


class QueryError(RaylightError, ValueError):
    """A query has an unknown or malformed filter, sort order, page or filter logic."""


class SpanError(RaylightError, ValueError):
    """A span has a value that the store cannot hold."""


class InvalidTransitionError(RaylightError, ValueError):
    """A change of status that the state tables do not allow."""


class WeightSyncError(RaylightError):
    """New weights, or another order to the engines, did not reach every engine in time, or were rejected."""


class CoordinatorUnavailableError(WeightSyncError):
    """The replica coordinator did not answer; a later call may succeed."""


class CoordinatorLostError(WeightSyncError):
    """The replica coordinator's actor is gone for good, and with it the run."""


class NotSubscribedError(WeightSyncError):
    """The replica coordinator does not know the replica, which must subscribe again."""


class ReplicaEvictedError(WeightSyncError):
    """The replica was removed because it did not execute orders; its replacement serves instead."""


class OffPolicySamplingError(RaylightError):
    """A call of a trained agent was sampled from a distribution that the learner cannot compute."""


class TransferBrokenError(WeightSyncError):
    """A transfer of weights lost one of its engines; it is repeated with those that are left."""


class MismatchError(RaylightError):
    """Log-probabilities of engine and learner differ by more than `max_logprob_mismatch` allows."""


class NonFiniteGradientError(RaylightError):
    """The gradient was NaN or infinite for several steps in a row."""


class LearnerError(RaylightError):
    """A learner rank failed in a way that a restart of the ranks would not cure."""


class LearnerLostError(LearnerError):
    """A learner rank died, hung, or lost its connection to the others; a restart of all ranks may cure it."""


class AdapterLostError(LearnerError):
    """An adapter in training is gone, because its trainer died and was started again."""


class LearnerMemoryError(LearnerError):
    """A learner rank ran out of memory, and would again with the same settings."""


class DeviceMemoryError(RaylightError):
    """The device has less memory than the run needs."""


class CheckpointError(RaylightError):
    """A training state cannot be written, read, or loaded into this model."""


class PromptError(RaylightError, ValueError):
    """A prompt template cannot be rendered: its text is malformed, or a value is missing."""


class CriticError(RaylightError):
    """The models that criticise and rewrite prompts (APO) do not answer."""


class EmitError(RaylightError, ValueError):
    """A value given to an emitter cannot be stored in a span, or a span's value cannot be read back."""


class EmitTypeError(EmitError, TypeError):
    """A value given to an emitter has another type than the emitter takes."""


class OutsideRolloutError(RaylightError, ValueError, AttributeError):
    """An attribute of an agent that exists only inside a rollout was read elsewhere."""


class HookError(RaylightError):
    """A hook's signature does not fit, or a strict hook raised."""


class TracerError(RaylightError):
    """This process cannot be traced with the given settings."""


class OtlpError(RaylightError):
    """A body sent to `/v1/traces` cannot be read.

    Args:
        message: description of the fault.
        status: HTTP status of the response: 400 (malformed), 413 (too large), 415 (unknown media type or
            content coding).
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def summarize_ray_error(error: BaseException) -> str:
    """Return the informative line of an error from Ray: its innermost exception's, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inner = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (inner[-1] if inner else lines[0] if lines else type(error).__name__).rstrip(".")
