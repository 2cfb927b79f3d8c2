"""Requirements of one task for a `CommandAgent`: instruction, files, sandbox, tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import Sandbox


@dataclass(frozen=True)
class HarnessTask:
    """Requirements of one task for a command. None and empty values: the agent's arguments decide."""

    prompt: str | None = None
    """Text for `{prompt}`."""
    files: Mapping[str, str | bytes] | None = None
    """Files of the working folder by their relative paths, written over the agent's."""
    sandbox: SandboxSpec | None = None
    """Sandbox of the rollout."""
    cwd: str | None = None
    """Working folder, in the sandbox."""
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Further variables; None removes one."""
    image_env: Mapping[str, str] = field(default_factory=dict)
    """Variables of an image that the sandbox does not have. They override the
    sandbox's variables; those of the model, the agent and the task override them."""
    timeout_s: float | None = None
    """Seconds after which the program is ended."""
    scores_timeouts: bool = False
    """Score what a program left that was ended by `timeout_s`."""
    prepare: Callable[[Sandbox], Awaitable[HarnessTask]] | None = None
    """Coroutine function, called with the started sandbox before the program runs. It returns the
    requirements that hold from then on, with the paths of the sandbox."""
    score: Callable[[Sandbox], Awaitable[Any]] | None = None
    """Coroutine function, called with the sandbox after the program has ended; it returns the reward. None:
    the agent's `reward` is used."""
    follow: Callable[[Sandbox], Awaitable[HarnessTask | None]] | None = None
    """Coroutine function, called with the sandbox after `score`. It returns the requirements of another step
    in the same sandbox, whose `score` returns the reward of all steps so far, or None at the end."""
