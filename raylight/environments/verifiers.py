"""Tasksets of verifiers as agents, whose rollouts share a process with a Python that has verifiers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, check_sampling
from raylight.environments.shared_services import shared_service
from raylight.environments.verifiers_process import VerifiersCommand, VerifiersProcess
from raylight.errors import ConfigError

PROGRAM = Path(__file__).with_name("verifiers_program.py")
SETTINGS = "RAYLIGHT_VERIFIERS"
"""Environment variable with the settings of the program, as JSON."""


def verifiers_agent(
    taskset: str,
    *,
    python: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
    harness: str = "null",
    max_turns: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> LitAgent[Any]:
    """Return an agent that runs a harness of verifiers on a task of a taskset; the trace's reward counts.

    A task of raylight is `{"idx": 5}`: a position in the taskset.

    Args:
        taskset: id of the taskset, the name of a module that verifiers' Python can import.
        python: the Python of the environment in which verifiers and the taskset are installed, on every
            machine with runners.
        config: settings of the taskset.
        harness: id of the harness. "null" is verifiers' own chat loop, which needs `uv` on the PATH.
        max_turns: model calls at most.
        sampling: parameters of model calls; those of the Trainer take precedence.
        env: further environment variables; None as a value removes one.
        cwd: working folder, from which the taskset can be imported too.

    Raises:
        ConfigError: a setting is not JSON, or a sampling parameter is out of range.
    """
    settings = {"taskset": taskset, "config": dict(config or {}), "harness": harness, "max_turns": max_turns}
    chosen = {"temperature": 1.0, **check_sampling(dict(sampling or {}))}
    try:
        encoded = json.dumps(settings)
        json.dumps(chosen)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"verifiers_agent: config and sampling must be JSON: {error}") from None
    search = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    variables = {"PATH": search, **(env or {}), SETTINGS: encoded}
    command = VerifiersCommand(
        (os.fspath(python), "-P", str(PROGRAM)),
        tuple(variables.items()),
        None if cwd is None else os.fspath(cwd),
    )

    @rollout
    async def verifiers(task: Any, llm: LLM) -> float:
        request = {
            "task": task,
            "base_url": llm.endpoint,
            "api_key": llm.api_key,
            "model": llm.model,
            "sampling": {**chosen, **llm.sampling_parameters},
        }
        return await shared_service(VerifiersProcess, command).run(request)

    return verifiers
