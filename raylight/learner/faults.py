"""Failures of learner ranks, classified as typed errors, and non-finite gradients.

The type decides if a restart can help. The driver uses this module too, so torch's exceptions are recognized
by name and torch is not imported.
"""

from __future__ import annotations

import math
import re

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from raylight._utils.broken_packages import find_broken
from raylight.config import LearnerConfig
from raylight.errors import (
    LearnerError,
    LearnerLostError,
    LearnerMemoryError,
    NonFiniteGradientError,
    RaylightError,
    summarize_ray_error,
)

OUT_OF_MEMORY = re.compile(
    r"out of memory|(can't|cannot) allocate memory|not enough memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
PEER_LOST = re.compile(
    r"gloo.*(closed|reset|refused|timed out|timeout|broken pipe)"
    r"|nccl.*(remote|abort|network|timeout|system error)",
    re.IGNORECASE,
)
KILLED_FOR_MEMORY = re.compile("low on memory", re.IGNORECASE)
MAX_NON_FINITE = 3
"""Consecutive non-finite gradients that end the run."""


class GradientGuard:
    """Counts optimizer steps with a non-finite gradient, which verl skips with a mere print."""

    def __init__(self) -> None:
        self.consecutive = 0

    def check(self, norm: float) -> dict[str, float]:
        """Count a step by its gradient norm, and return metrics.

        Raises:
            NonFiniteGradientError: the norm was not finite `MAX_NON_FINITE` times in a row.
        """
        skipped = not math.isfinite(norm)
        self.consecutive = self.consecutive + 1 if skipped else 0
        if self.consecutive >= MAX_NON_FINITE:
            raise NonFiniteGradientError(
                f"the gradient was not finite {MAX_NON_FINITE} times in a row; lower lr or grad_clip, or "
                "set learner.dtype='float32'"
            )
        return {"learner/skipped_steps": float(skipped)}


def classify_in_rank(error: BaseException, rank: int, config: LearnerConfig) -> RaylightError | None:
    """Return the typed error for an exception in a rank; None for an ordinary or already typed one."""
    if isinstance(error, RaylightError):
        return None
    types = {cls.__name__ for cls in type(error).__mro__}
    text = _first_line(error)
    is_runtime_error = isinstance(error, RuntimeError)
    if (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in types
        or (is_runtime_error and OUT_OF_MEMORY.search(str(error)))
    ):
        return LearnerMemoryError(f"learner {rank} ran out of memory: {text}. {memory_advice(config)}")
    if "DistError" in types or (is_runtime_error and PEER_LOST.search(str(error))):
        return LearnerLostError(f"learner {rank} lost the connection to the other learners: {text}")
    broken = find_broken(error)
    return broken.error() if broken else None


def classify_in_driver(error: BaseException, rank: int, config: LearnerConfig, log: str) -> BaseException:
    """Return the typed error for an exception that a call to a rank raised in the driver.

    Args:
        log: command that prints the rank's log.
    """
    if isinstance(error, OutOfMemoryError) or (
        isinstance(error, RayActorError) and KILLED_FOR_MEMORY.search(str(error))
    ):
        return LearnerMemoryError(
            f"Ray killed learner {rank} because its node ran out of memory. {memory_advice(config)}; or let "
            "fewer processes share the node"
        )
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, RaylightError):
            return error.cause
        return LearnerError(
            f"learner {rank} failed: {error.cause!r}; the full traceback is in the driver's log"
        )
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return LearnerError(
            f"learner {rank} did not start: {summarize_ray_error(error)}. See its log with `{log}`"
        )
    if isinstance(error, RayError):
        return LearnerLostError(f"learner {rank} died: {_cause_of_death(error)}. See its log with `{log}`")
    return error


def reports_lost_peer(error: BaseException) -> bool:
    """True if a rank reports only that it lost another rank, whose own error is the cause."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, LearnerLostError)


def memory_advice(config: LearnerConfig) -> str:
    """Return advice on the settings that reduce a rank's memory, with their current values."""
    offload = (
        "move parameters and optimizer off the GPU with param_offload and optimizer_offload "
        f"({config.param_offload} and {config.optimizer_offload} now)"
    )
    return (
        f"In LearnerConfig, lower max_tokens_per_micro_batch ({config.max_tokens_per_micro_batch} now), set "
        f"gradient_checkpointing ({config.gradient_checkpointing} now), or "
        f"{offload if config.num_gpus else 'train an adapter (lora) instead of the full model'}"
    )


def _cause_of_death(error: RayError) -> str:
    """Return the line of Ray's message that explains the end of the process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explaining = [
        line
        for line in lines
        if re.search(r"exit|killed|node|unavailable", line, re.IGNORECASE) and "_" not in line.split(":")[0]
    ]
    return (explaining or lines or [type(error).__name__])[0].rstrip(".")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
