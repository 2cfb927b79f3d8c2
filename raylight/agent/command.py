"""Agent that is a program of its own: in another virtual environment, another Python or another language."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import quote

from pydantic_core import PydanticSerializationError, to_json

from raylight.agent.litagent import LitAgent, RolloutResult
from raylight.agent.process_guard import ProcessGuard
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import AgentSignatureError, CommandError, CommandUnavailableError, RewardError
from raylight.types import Rollout

Command = Sequence[str | os.PathLike[str]]
MAX_STDOUT = 4 * 1024 * 1024
MAX_STDERR = 64 * 1024
"""Bytes of a command's output that are kept: the last ones."""
MESSAGE_LINES, MESSAGE_LETTERS = 3, 400
TRACE_LINES, TRACE_LETTERS = 30, 4000
"""Limits of the part of the standard error that a failure's message and its trace show."""
TERMINATE_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL when a rollout is cancelled. The runner waits 5 s for an agent."""
DRAIN_S = 1.0
"""Time in which the pipes of an ended command must close; a daemon that it left behind may hold them."""
PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables of the runner's Python, which would make another Python import the runner's packages."""

GUARD = ProcessGuard()


@dataclass(frozen=True)
class CommandResult:
    """Output of a command that ended with exit status 0, as text."""

    stdout: str
    """The last 4 MiB of the standard output."""
    stderr: str
    """The last 64 KiB of the standard error."""


class CommandAgent(LitAgent[Any]):
    """Agent that runs a program once for each rollout, such as `["/envs/crew/bin/python", "agent.py"]`.

    The program receives the task as JSON on its standard input, and the model in environment variables, where
    OpenAI's and Anthropic's clients look for it: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_MODEL. RAYLIGHT_SAMPLING_PARAMETERS has the model's
    `sampling_parameters` as JSON; RAYLIGHT_ROLLOUT_ID, RAYLIGHT_ATTEMPT_ID and RAYLIGHT_MODE describe the
    rollout. With `sends_spans`, OpenTelemetry's exporters find the run's endpoint for spans, and its key, in
    OTEL_EXPORTER_OTLP_TRACES_*.

    A status other than 0 fails the rollout, and the failure shows the end of the standard error. Status 75
    (EX_TEMPFAIL) reports a failed service: the rollout is retried. When a rollout is cancelled or takes too
    long, the program's process group is sent SIGTERM, and SIGKILL after 3 s. Processes that it leaves behind
    are killed.

    Args:
        command: program and arguments, or a function that returns them for a task. Never put a key there: all
            users of a machine can read command lines.
        reward: origin of the reward. "stdout": the last line of the standard output, a JSON number, an object
            of named rewards (the primary one first), or null for none. "exit_status": 1.0 for status 0, 0.0
            for status 1, with which Python and Node also end after an uncaught exception. A function, which
            may be asynchronous, receives the task and a `CommandResult`, and returns what a rollout may
            return.
        env: further environment variables. None as a value removes a variable. The runner's own variables are
            inherited, except those of its Python environment, such as PYTHONPATH.
        cwd: working directory.
        llm: name of the resource with the model. None: `llm`, or the first model.
        sends_spans: give the program the key for spans too. Spans may be rewards, so that everything that
            runs in the program, the model's own code included, can then set rewards.
        trained_agents: as in `LitAgent`.

    Raises:
        AgentSignatureError: the command or `reward` is of a wrong type.
    """

    def __init__(
        self,
        command: Command | Callable[[Any], Command],
        *,
        reward: Literal["stdout", "exit_status"] | Callable[[Any, CommandResult], Any] = "stdout",
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        llm: str | None = None,
        sends_spans: bool = False,
        trained_agents: str | None = None,
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        if not callable(command):
            command = _check_command(command)
        if reward not in ("stdout", "exit_status") and not callable(reward):
            raise AgentSignatureError(
                f'CommandAgent: reward={reward!r:.80} is unknown; give "stdout", "exit_status" or a function '
                "of the task and the result"
            )
        self._command = command
        self._reward = reward
        self._env = dict(env or {})
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._llm = llm
        self._sends_spans = sends_spans

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        command = _check_command(self._command(task)) if callable(self._command) else self._command
        llm = self._model(resources).with_attempted_rollout(rollout)
        environment = _environment(llm, rollout, self._env, self._sends_spans)
        process = _Process(command, environment, self._cwd)
        await process.run(_task_json(task))
        if self._reward == "exit_status" and process.status in (0, 1):
            return 1.0 - process.status
        if process.status != 0:
            raise _status_error(command[0], process, hidden=(llm.api_key, llm.traces_key))
        result = CommandResult(process.stdout, process.stderr)
        if not callable(self._reward):
            return _read_reward(command[0], result)
        if inspect.iscoroutinefunction(self._reward):
            return await self._reward(task, result)
        return await asyncio.to_thread(self._reward, task, result)

    def check(self, resources: Any, modes: Any = (), *, more_may_come: bool = False) -> None:
        super().check(resources, modes, more_may_come=more_may_come)
        if isinstance(resources, Mapping) and not more_may_come:
            self._model(resources)

    @property
    def display_name(self) -> str:
        return "CommandAgent" if callable(self._command) else f"CommandAgent {self._command[0]}"

    def _model(self, resources: Mapping[str, Any]) -> LLM:
        """Return the resource that the program receives as its model."""
        models = {
            name: resource
            for name, resource in resources.items()
            if isinstance(resource, LLM) and not resource.tokenizer_only
        }
        name = self._llm or ("llm" if "llm" in models else next(iter(models), None))
        if name not in models:
            raise AgentSignatureError(
                f"CommandAgent has no model {name or 'at all'}; the models of this run are "
                f"{', '.join(models) or 'none'}. Pass llm=NAME, or give the Trainer one in initial_resources"
            )
        return models[name]


def _check_command(command: Any) -> list[str]:
    if isinstance(command, str | bytes) or not isinstance(command, Sequence) or not command:
        raise AgentSignatureError(
            f"CommandAgent: the command is {command!r:.80}; give a list of the program and its arguments, "
            'such as ["node", "agent.mjs"]'
        )
    for part in command:
        if not isinstance(part, str | os.PathLike):
            raise AgentSignatureError(
                f"CommandAgent: {part!r:.80} in the command is of type {type(part).__name__}; give strings"
            )
    return [os.fspath(part) for part in command]


def _environment(
    llm: LLM, rollout: Rollout, further: Mapping[str, str | None], sends_spans: bool
) -> dict[str, str]:
    """Return the environment of the program."""
    assert rollout.attempt is not None, "only a dequeued rollout is executed"
    root = llm.endpoint.rstrip("/").removesuffix("/v1")
    ours: dict[str, str | None] = {
        "OPENAI_BASE_URL": llm.endpoint or None,
        "OPENAI_API_BASE": llm.endpoint or None,  # the name in LiteLLM and older clients
        "OPENAI_MODEL": llm.model,
        "ANTHROPIC_BASE_URL": root or None,  # its client adds /v1
        "ANTHROPIC_MODEL": llm.model,
        "RAYLIGHT_SAMPLING_PARAMETERS": json.dumps(llm.sampling_parameters),
        "RAYLIGHT_ROLLOUT_ID": rollout.rollout_id,
        "RAYLIGHT_ATTEMPT_ID": rollout.attempt.attempt_id,
        "RAYLIGHT_MODE": rollout.mode or "",
    }
    if llm.api_key is not None:  # otherwise the client reads its own key from the environment
        ours |= {"OPENAI_API_KEY": llm.api_key, "ANTHROPIC_API_KEY": llm.api_key}
    if sends_spans and llm.traces_key is not None:
        ours |= {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{llm.endpoint}/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"Authorization={quote(f'Bearer {llm.traces_key}')}",
        }
    inherited = {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}
    return {name: value for name, value in {**inherited, **ours, **further}.items() if value is not None}


def _task_json(task: Any) -> bytes:
    try:
        return to_json(task) + b"\n"
    except PydanticSerializationError as error:
        raise CommandError(
            f"the task {task!r:.80} cannot be sent to the agent's command, because it is not JSON ({error}); "
            "use dicts, lists, strings, numbers, dataclasses or pydantic models"
        ) from None


def _read_reward(program: str, result: CommandResult) -> Any:
    """Return the reward in the last line of the standard output."""
    last = result.stdout.rstrip().rpartition("\n")[2].strip()
    with contextlib.suppress(ValueError):
        reward = json.loads(last)
        if reward is None or isinstance(reward, bool | int | float | dict):
            return reward
    found = f"is {last!r:.200}" if last else "is missing, because it printed nothing"
    raise RewardError(
        f"the last line of the standard output of {program} {found}; print the reward there as a JSON "
        'number, an object of named rewards, or null. CommandAgent(reward="exit_status" or a function) reads '
        "it elsewhere"
    )


def _status_error(program: str, process: _Process, hidden: tuple[str | None, ...]) -> CommandError:
    status, stderr = process.status, process.stderr.strip()
    for key in hidden:
        if key and key != "unused":
            stderr = stderr.replace(key, "***")
    reason = f"exit status {status}" if status >= 0 else f"signal {_signal_name(-status)}"
    lines = _last_lines(stderr, MESSAGE_LINES, MESSAGE_LETTERS)
    message = f"the agent's command {program} ended with {reason}. " + (
        f"Its standard error ends: {lines}" if lines else "It wrote nothing to its standard error"
    )
    error = CommandUnavailableError(message) if status == os.EX_TEMPFAIL else CommandError(message)
    if stderr:
        error.add_note(f"standard error of {program}:\n{_last_lines(stderr, TRACE_LINES, TRACE_LETTERS)}")
    return error


def _last_lines(text: str, count: int, letters: int) -> str:
    return "\n".join(text.splitlines()[-count:])[-letters:]


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


class _Process(asyncio.SubprocessProtocol):
    """A running command: its input, the ends of its outputs, and the end of its process group.

    `asyncio.Process.wait` may wait for processes that the command left behind, as they hold its pipes; this
    waits for the command itself.
    """

    def __init__(self, command: list[str], env: dict[str, str], cwd: str | None) -> None:
        loop = asyncio.get_running_loop()
        self._command, self._env, self._cwd = command, env, cwd
        self._exited: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._tails = {1: bytearray(), 2: bytearray()}
        self._limits = {1: MAX_STDOUT, 2: MAX_STDERR}
        self.status = 0
        """Exit status; negative: the signal that ended the process."""

    @property
    def stdout(self) -> str:
        return self._tails[1].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._tails[2].decode(errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail, limit = self._tails[fd], self._limits[fd]
        tail += data
        if len(tail) > 2 * limit:  # rarely, so that each byte is moved once on average
            del tail[:-limit]

    def process_exited(self) -> None:
        if not self._exited.done():
            self._exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    async def run(self, stdin: bytes) -> None:
        """Run the command to its end. A cancellation ends its process group.

        Raises:
            CommandError: the program cannot be started.
        """
        # `asyncio.wait` does not cancel what it waits for: a cancelled start would leave processes behind
        # and a cancelled future would look like an exit
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait([starting])
            transport = starting.result()
            GUARD.add(transport.get_pid())
            pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            if not pipe.is_closing():  # the program may have ended
                pipe.write(stdin)
                pipe.close()  # after what was written
            await asyncio.wait([self._exited])
            self.status = transport.get_returncode() or 0
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                _signal_group(starting.result(), signal.SIGTERM)
                await asyncio.wait([self._exited], timeout=TERMINATE_GRACE_S)
            raise
        finally:
            if starting.done() and starting.exception() is None:
                await self._close(starting.result())

    async def _close(self, transport: asyncio.SubprocessTransport) -> None:
        """Kill what remains of the process group, and read the rest of the outputs."""
        _signal_group(transport, signal.SIGKILL)
        GUARD.remove(transport.get_pid())
        try:
            await asyncio.wait([self._closed], timeout=DRAIN_S)
        finally:
            transport.close()
            for fd, tail in self._tails.items():
                del tail[: -self._limits[fd]]

    async def _start(self) -> asyncio.SubprocessTransport:
        GUARD.start()
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: self, *self._command, env=self._env, cwd=self._cwd, start_new_session=True
            )
        except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
            if isinstance(error, OSError) and self._cwd is not None and error.filename == self._cwd:
                remedy = "Correct CommandAgent(cwd=...), or create the folder"
            else:
                remedy = "Give the full path of the program or a name in PATH, and install it"
            raise CommandError(
                f"the agent's command {self._command[0]} cannot be started: {error}. {remedy} on every "
                "machine with runners"
            ) from None
        return transport


def _signal_group(transport: asyncio.SubprocessTransport, number: int) -> None:
    """Send a signal to the command and all processes that it started and that are still in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(transport.get_pid(), number)
