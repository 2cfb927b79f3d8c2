"""What a rank's failure means: whether ranks that are started anew could go on, or would fail alike."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from raylight.config import LearnerConfig
from raylight.errors import (
    LearnerError,
    LearnerLostError,
    LearnerMemoryError,
    RaylightError,
    summarize_ray_error,
)

NO_MEMORY = re.compile(
    r"out of memory|(can't|cannot) allocate memory|not enough memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
NO_PEER = re.compile(
    r"gloo.*(closed|reset|refused|timed out|timeout|broken pipe)|nccl.*(remote|abort|network|timeout|system error)",
    re.IGNORECASE,
)
KILLED_FOR_MEMORY = re.compile("low on memory", re.IGNORECASE)


def fault_in_rank(error: BaseException, rank: int, config: LearnerConfig) -> RaylightError | None:
    """What an exception in a rank is in our words; None if it is an error of code like any other.

    torch's own types are known by name, so that the driver, which reads the same faults, need not load torch.
    """
    if isinstance(error, RaylightError):
        return None
    types = {cls.__name__ for cls in type(error).__mro__}
    text = _first_line(error)
    runtime = isinstance(error, RuntimeError)
    if (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in types
        or (runtime and NO_MEMORY.search(str(error)))
    ):
        return LearnerMemoryError(f"learner {rank} ran out of memory: {text}. {memory_advice(config)}")
    if "DistError" in types or (runtime and NO_PEER.search(str(error))):
        return LearnerLostError(f"learner {rank} lost the other learners: {text}")
    return None


def memory_advice(config: LearnerConfig) -> str:
    """The three settings that make a rank need less, and what they are now."""
    offload = f"keep less on the GPU with param_offload and optimizer_offload ({config.param_offload} and {config.optimizer_offload} now)"
    return (
        f"In LearnerConfig, lower max_tokens_per_micro_batch ({config.max_tokens_per_micro_batch} now), set "
        f"gradient_checkpointing ({config.gradient_checkpointing} now), or "
        f"{offload if config.num_gpus else 'train an adapter (lora) instead of the whole model'}"
    )


def fault_of(error: BaseException, rank: int, config: LearnerConfig, log: str) -> BaseException:
    """What the driver makes of the exception that a call to a rank ended with.

    Args:
        log: how to see the rank's log.
    """
    if isinstance(error, OutOfMemoryError) or (
        isinstance(error, RayActorError) and KILLED_FOR_MEMORY.search(str(error))
    ):
        return LearnerMemoryError(
            f"Ray killed learner {rank} because its node ran out of memory. {memory_advice(config)}; or let fewer processes share "
            "the node"
        )
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, RaylightError):
            return error.cause
        return LearnerError(
            f"learner {rank} failed: {error.cause!r}; the whole traceback is in the driver's log"
        )
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return LearnerError(
            f"learner {rank} did not start: {summarize_ray_error(error)}. See its log with `{log}`"
        )
    if isinstance(error, RayError):
        return LearnerLostError(f"learner {rank} died: {_death(error)}. See its log with `{log}`")
    return error


def is_hearsay(error: BaseException) -> bool:
    """Whether a rank only tells that it lost another one; what befell that one tells more."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, LearnerLostError)


def _death(error: RayError) -> str:
    """The line of Ray's many that tells how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line
        for line in lines
        if re.search(r"exit|killed|node|unavailable", line, re.IGNORECASE) and "_" not in line.split(":")[0]
    ]
    return (told or lines or [type(error).__name__])[0].rstrip(".")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
