"""Tasksets of verifiers as agents, whose rollouts share a process with a Python that has verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, check_sampling
from raylight.environments.shared_services import shared_service
from raylight.errors import ConfigError, EnvironmentServerError, EnvironmentUnavailableError, RaylightError
from raylight.sandboxes.local_program import ProcessGuard
from raylight.sandboxes.marked_processes import MARK_VARIABLE
from raylight.types import JsonObject

PROGRAM = Path(__file__).with_name("verifiers_program.py")
SETTINGS = "RAYLIGHT_VERIFIERS"
"""Environment variable with the settings of the program, as JSON."""
STDERR_BYTES = 4000
"""Part of the standard error that an error shows."""
CLOSE_S = 10.0
"""Time in which a process must end after its input."""
STDERR_S = 5.0
"""Time for the rest of the standard error of a process that has ended."""
LONGEST_ANSWER = 1024**2
GUARD = ProcessGuard()


def verifiers_agent(
    taskset: str,
    *,
    python: str | os.PathLike[str],
    config: Mapping[str, object] | None = None,
    harness: str = "null",
    max_turns: int | None = None,
    sampling: Mapping[str, object] | None = None,
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
        sampling: parameters of model calls; the Trainer's take precedence.
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
    async def verifiers(task: object, llm: LLM) -> float:
        request = {
            "task": task,
            "base_url": llm.endpoint,
            "api_key": llm.api_key,
            "model": llm.model,
            "sampling": {**chosen, **llm.sampling_parameters},
        }
        return await shared_service(VerifiersProcess, command).run(request)

    return verifiers


@dataclass(frozen=True)
class VerifiersCommand:
    """Command of a process."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str | None], ...]
    """Variables; None removes one that is inherited."""
    cwd: str | None


class VerifiersProcess:
    """A process with the Python of verifiers, which runs the rollouts of one event loop.

    It begins when this is created, and ends with the event loop, or with the runner.
    """

    def __init__(self, command: VerifiersCommand) -> None:
        self._command = command
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._stderr = b""
        self._error: RaylightError | None = None
        """Reason of the end."""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold())

    @property
    def is_usable(self) -> bool:
        """True until the process has ended."""
        return self._error is None

    async def run(self, request: Mapping[str, object]) -> float:
        """Run a rollout; return its reward.

        Raises:
            EnvironmentServerError: the process did not start, or the rollout failed.
            EnvironmentUnavailableError: the process ended, or a service failed.
        """
        await asyncio.shield(self._ready)
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, **request})
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """End the process, and what it left behind."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await asyncio.wait([self._holder], timeout=CLOSE_S)
        self._holder.cancel()
        await asyncio.wait([self._holder])

    def _send(self, message: JsonObject) -> None:
        if self._process is not None and self._process.stdin is not None and self.is_usable:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _hold(self) -> None:
        mark, error = uuid.uuid4().hex, None
        changes = {**dict(self._command.env), MARK_VARIABLE: mark}
        env = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
        GUARD.start()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LONGEST_ANSWER,
                env=env,
                cwd=self._command.cwd,
                start_new_session=True,
            )
            GUARD.add(self._process.pid, mark)
            stderr = asyncio.create_task(self._read_stderr())
            await self._read_answers()
            status = await self._process.wait()
            await asyncio.wait([stderr], timeout=STDERR_S)
            error = self._end_error(status)
        except OSError as failure:
            error = EnvironmentServerError(
                f"verifiers' Python {self._command.command[0]} cannot be started: {failure}; give the full "
                "path of a Python with verifiers on every machine with runners"
            )
        finally:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # harnesses that are left
                await self._process.wait()
                GUARD.remove(self._process.pid, mark)
            self._fail(error or EnvironmentUnavailableError("the process of verifiers was closed"))

    def _fail(self, error: RaylightError) -> None:
        """Give an error to all that wait, and to those that come later."""
        self._error = error
        futures: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved, because no task may wait for it

    async def _read_answers(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set_result(None)
                continue
            future = self._waiting.get(answer["id"])
            if future is None or future.done():  # the rollout was cancelled
                continue
            if "reward" in answer:
                future.set_result(answer["reward"])
            else:
                kind = EnvironmentUnavailableError if answer["service"] else EnvironmentServerError
                future.set_exception(kind(f"the rollout failed in verifiers: {answer['error']}"))

    async def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-STDERR_BYTES:]

    def _end_error(self, status: int) -> EnvironmentServerError:
        shown = self._stderr.decode(errors="replace").strip()
        ended = f"ended with status {status}. Its standard error ends: {shown or '(nothing)'}"
        if not self._ready.done():
            return EnvironmentServerError(f"the process of verifiers {ended}")
        return EnvironmentUnavailableError(
            f"the process of verifiers {ended}. The attempt is run again in a new one"
        )
