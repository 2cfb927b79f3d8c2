"""OpenEnv environments as agents: the model plays an episode on an OpenEnv server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from raylight._utils.aio import pause
from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.environments.text_game import play_moves
from raylight.environments.tool_loop import answer_calls, call_tool, cut_result, run_tool_loop
from raylight.errors import ConfigError, DatasetError, EnvironmentServerError, EnvironmentUnavailableError
from raylight.types import JsonObject
from raylight.types.json_object import parse_json

Rewards = Literal["sum", "last"] | Callable[[JsonObject], float]
MAX_MESSAGE = 100 * 1024 * 1024
"""Bytes of the longest message, as in OpenEnv's own client."""
CLOSE_S = 2.0
"""Time in which the server must answer the end of a connection."""
PING_S = 20.0
"""Time between two pings, for proxies that close quiet connections."""
SPOKEN = "raylight speaks the WebSocket protocol of openenv 0.10"
TOOL_ACTIONS = ("tool_name", "list_tools")
"""Words in the schema of actions of environments whose actions are calls of MCP tools."""


def openenv_agent(
    url: str,
    *,
    prompt: Callable[[JsonObject], str] | None = None,
    parse: Callable[[str], JsonObject] | None = None,
    tools: bool | None = None,
    system: str | None = None,
    reward: Rewards = "sum",
    max_turns: int = 16,
    sampling: Mapping[str, object] | None = None,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> LitAgent[Any]:
    """Return an agent that plays one episode of an OpenEnv environment for each task.

    A task is a dict of parameters for the environment's reset, such as `{"seed": 3}`. The model reads each
    observation as a user message, and its answer is the action, until the episode is done. In environments
    whose actions are calls of MCP tools, the model calls them as its own, until it answers without a call.

    Args:
        url: address of the server, such as "ws://127.0.0.1:8000".
        prompt: text of an observation (a dict) for the model. None: the value of its only field, or all
            fields as JSON.
        parse: action (a dict) from the model's answer. A ValueError's message is sent to the model, as a
            mistake. None: the value of the schema's only field, or JSON.
        tools: True if actions are calls of MCP tools. None: as the server's schema says.
        system: system prompt.
        reward: reward of the rollout: "sum" of the rewards of all steps, the "last" of them, or a function of
            the state that the server returns at the end.
        max_turns: largest number of model calls. The rewards until then count.
        sampling: parameters of model calls; the Trainer's take precedence.
        timeout_s: seconds in which the server must answer each message.
        headers: HTTP headers for the connection, such as an authorization.

    Raises:
        ConfigError: an argument has the wrong type.
    """
    base = re.sub(r"^ws", "http", url.rstrip("/").removesuffix("/ws")) if isinstance(url, str) else ""
    if not re.match(r"https?://[^/]+", base):
        raise ConfigError(
            f'openenv_agent: {url!r:.80} is not an address; give one such as "ws://127.0.0.1:8000"'
        )
    if reward not in ("sum", "last") and not callable(reward):
        raise ConfigError(
            f'openenv_agent: reward={reward!r:.80} is unknown; give "sum", "last" or a function'
        )
    if max_turns < 1 or timeout_s <= 0:
        raise ConfigError("openenv_agent: max_turns and timeout_s must be positive")

    @rollout
    async def openenv(task: JsonObject, llm: LLM) -> float:
        if not isinstance(task, Mapping):
            raise DatasetError(
                f"openenv_agent: the task {task!r:.80} is not a dict; give the parameters of the "
                'environment\'s reset, such as {"seed": 3}'
            )
        async with open_session(base, headers, timeout_s) as session:
            schema = await session.action_schema() if parse is None and not tools else {}
            with_tools = (parse is None and is_tool_schema(schema)) if tools is None else tools
            episode = Episode(session, parse or action_parser(schema), prompt or observation_text)
            messages = [] if system is None else [{"role": "system", "content": system}]
            limits: JsonObject = {"max_turns": max_turns, "sampling": sampling}
            with contextlib.suppress(EpisodeDoneError):
                messages.append({"role": "user", "content": await episode.begin(task)})
                if with_tools:
                    await episode.list_tools()
                    await run_tool_loop(llm, messages, episode, **limits)
                else:
                    await play_moves(llm, messages, episode.step, **limits)
            return await episode.total(reward)

    return openenv


class EpisodeDoneError(Exception):
    """The environment has ended the episode, so the model is not called any more."""


@dataclass(eq=False)
class Episode:
    """An episode of an environment: text moves by `step`, or tools for `run_tool_loop`."""

    _session: OpenEnvSession
    _parse: Callable[[str], JsonObject]
    """Action from an answer of the model."""
    _prompt: Callable[[JsonObject], str]
    """Text of an observation."""
    schemas: list[JsonObject] = field(default_factory=list)
    _rewards: list[float] = field(default_factory=list)
    _done: bool = False
    _one_action: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin(self, task: JsonObject) -> str:
        """Reset the environment; return its first observation.

        Raises:
            DatasetError: the environment rejects the task.
            EpisodeDoneError: the episode has ended with its reset.
        """
        try:
            first = await self._session.reset(task)
        except InvalidActionError as error:
            raise DatasetError(
                f"openenv_agent: the environment rejects the task {task!r:.200}: {error}"
            ) from None
        self._done = first.done
        self._check_done()
        return cut_result(self._prompt(first.observation))

    async def step(self, answer: str) -> str:
        """Execute the action that an answer names; return the observation, or the model's mistake.

        Raises:
            EpisodeDoneError: the episode has ended.
        """
        try:
            text = self._prompt(await self._act(self._parse(answer)))
        except (ValueError, InvalidActionError) as error:
            text = f"error: {error}"
        self._check_done()
        return cut_result(text)

    async def list_tools(self) -> None:
        """Ask the environment for its tools."""
        listed = (await self._session.step({"type": "list_tools"})).observation.get("tools") or []
        for tool in listed:
            function = {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            }
            self.schemas.append({"type": "function", "function": function})

    async def answer(self, message: Any) -> list[JsonObject]:
        """Execute the tool calls of a message in their order; return the tool messages.

        Raises:
            EpisodeDoneError: the episode has ended.
        """
        names = [schema["function"]["name"] for schema in self.schemas]

        async def call(name: str, arguments: str) -> str | list[Any]:
            async with self._one_action:
                return await call_tool(names, name, arguments, functools.partial(self._call, name))

        answers = await answer_calls(message, call)
        self._check_done()
        return answers

    async def total(self, reward: Rewards) -> float:
        """Return the reward of the episode.

        Raises:
            EnvironmentServerError: no step had a reward.
        """
        if callable(reward):
            return reward(await self._session.state())
        if not self._rewards:
            raise EnvironmentServerError(
                "the OpenEnv environment gave no reward in this episode; give openenv_agent(reward=...), a "
                "function of its state, or a larger max_turns"
            )
        return sum(self._rewards) if reward == "sum" else self._rewards[-1]

    async def _call(self, name: str, arguments: JsonObject) -> str:
        """Execute a tool call as an action; return its result, or the error that the model reads."""
        if self._done:
            return "error: the episode is over"
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            observation = await self._act(action)
        except InvalidActionError as error:
            return f"error: {error}"
        if failure := observation.get("error"):
            return f"error: {failure.get('message', failure) if isinstance(failure, dict) else failure}"
        return tool_text(observation.get("result"))

    async def _act(self, action: JsonObject) -> JsonObject:
        """Execute an action; return its observation."""
        step = await self._session.step(action)
        self._done = step.done
        if step.reward is not None:
            self._rewards.append(float(step.reward))
        return step.observation

    def _check_done(self) -> None:
        if self._done:
            raise EpisodeDoneError


class InvalidActionError(Exception):
    """The server does not accept an action: a mistake of the model, which reads the message."""


class EpisodeStep(BaseModel):
    """Answer to a reset or an action."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    observation: JsonObject
    reward: bool | float | None = None
    done: bool = False


class ServerMessage(BaseModel):
    """Message of the server. Its data depends on the type."""

    type: str
    data: JsonObject


@dataclass(frozen=True, eq=False)
class OpenEnvSession:
    """One environment on the server, for one episode: reset, step, state, close. Made by `open_session`.

    Its WebSocket messages follow `openenv.core.env_server` of the package openenv 0.10.

    All methods raise EnvironmentUnavailableError if the server does not answer in time or closes the
    connection, and EnvironmentServerError if it reports an error or its answer is not of OpenEnv's protocol.
    """

    _url: str
    _http: Any
    _socket: Any
    _timeout_s: float

    async def action_schema(self) -> JsonObject:
        """Return the JSON schema of the environment's actions."""
        async with (
            failures(self._url, self._timeout_s),
            self._http.get(f"{self._url}/schema") as response,
        ):
            found = await response.json(content_type=None) if response.status == 200 else None
        action = found.get("action") if isinstance(found, dict) else None
        if not isinstance(action, dict):
            raise EnvironmentServerError(
                f"{self._url}/schema of the OpenEnv server has no action schema (status {response.status}); "
                "give openenv_agent(parse=...), which makes an action from the model's answer"
            )
        return action

    async def reset(self, parameters: JsonObject) -> EpisodeStep:
        return self._step(await self._ask("reset", dict(parameters)))

    async def step(self, action: JsonObject) -> EpisodeStep:
        """Execute an action.

        Raises:
            InvalidActionError: the action does not fit the environment's schema.
        """
        return self._step(await self._ask("step", dict(action)))

    async def state(self) -> JsonObject:
        return await self._ask("state", None)

    async def close(self) -> None:
        """End the episode. The server ends the environment."""
        with contextlib.suppress(ConnectionError, RuntimeError):  # the connection is closed
            await self._socket.send_str(json.dumps({"type": "close"}))

    async def send_pings(self) -> None:
        """Send a ping from time to time. A server that executes a long step need not answer it."""
        with contextlib.suppress(ConnectionError, RuntimeError):  # the connection is closed
            while True:
                await pause(PING_S)
                await self._socket.ping()

    async def _ask(self, kind: str, data: JsonObject | None) -> JsonObject:
        try:
            message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        except (TypeError, ValueError) as error:
            raise EnvironmentServerError(
                f"the {kind} of the OpenEnv server {self._url} needs JSON, and got {data!r:.200}: {error}"
            ) from None
        async with failures(self._url, self._timeout_s):
            await self._socket.send_str(message)
            frame = await self._socket.receive()
        return self._read("observation" if kind in ("reset", "step") else kind, frame)

    def _read(self, expected: str, frame: Any) -> JsonObject:
        """Return the data of an answer."""
        from aiohttp import WSMsgType

        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            raise EnvironmentUnavailableError(
                f"the OpenEnv server {self._url} closed the connection in an episode (code {frame.data}); "
                "the attempt is retried. See the log of the server"
            )
        answer = None
        if frame.type == WSMsgType.TEXT:
            with contextlib.suppress(ValidationError):
                answer = ServerMessage.model_validate_json(frame.data)
        if answer is not None and answer.type == "error":
            raise self._error(answer.data)
        if answer is None or answer.type != expected:
            shown = f"a frame {frame.type.name} with {frame.data!r:.200}"
            raise EnvironmentServerError(
                f"the OpenEnv server {self._url} answered with {shown}, and not with {expected!r}; {SPOKEN}"
            )
        return answer.data

    def _error(self, data: JsonObject) -> Exception:
        code, message = data.get("code"), str(data.get("message"))[:1000]
        if code == "VALIDATION_ERROR":
            details = [f"{error.get('loc')}: {error.get('msg')}" for error in data.get("errors") or ()]
            return InvalidActionError("; ".join([message, *details])[:1000])
        if code == "CAPACITY_REACHED":
            return EnvironmentUnavailableError(
                f"the OpenEnv server {self._url} has no room for another episode ({message}); raise its "
                "max_concurrent_envs to the rollouts of all runners, or lower runner={'max_concurrent': ...}"
            )
        return EnvironmentServerError(
            f"the OpenEnv server {self._url} reports {code}: {message}; see its log"
        )

    def _step(self, data: JsonObject) -> EpisodeStep:
        try:
            return EpisodeStep.model_validate(data)
        except ValidationError:
            raise EnvironmentServerError(
                f"the OpenEnv server {self._url} sent no observation with reward and done: {data!r:.200}; "
                f"{SPOKEN}"
            ) from None


@contextlib.asynccontextmanager
async def failures(url: str, timeout_s: float) -> AsyncIterator[None]:
    """Limit the time of a block, and convert its errors of connections."""
    import aiohttp

    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EnvironmentUnavailableError(
            f"the OpenEnv server {url} did not answer within {timeout_s:g} s; the attempt is retried. Raise "
            "openenv_agent(timeout_s=...) if its steps take longer"
        ) from None
    except aiohttp.WSServerHandshakeError as error:
        if error.status >= 500:
            raise EnvironmentUnavailableError(
                f"the OpenEnv server {url} answered with status {error.status}; the attempt is retried"
            ) from error
        raise EnvironmentServerError(
            f"{url}/ws is not a WebSocket (status {error.status}: {error.message}); give the address of a "
            'server made by openenv\'s create_app, such as "ws://127.0.0.1:8000"'
        ) from error
    except (aiohttp.ClientConnectionError, ConnectionError) as error:
        raise EnvironmentUnavailableError(
            f"the OpenEnv server {url} cannot be reached: {error!r:.300}; the attempt is retried. Start it, "
            "and give an address that every machine with runners reaches"
        ) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise EnvironmentServerError(
            f"the OpenEnv server {url} broke its protocol: {error!r:.300}"
        ) from error


@contextlib.asynccontextmanager
async def open_session(
    url: str, headers: Mapping[str, str] | None, timeout_s: float
) -> AsyncIterator[OpenEnvSession]:
    """Connect to a server, which makes an environment, and end it after the block.

    Args:
        url: address without `/ws`, of the scheme http or https.
        timeout_s: seconds for each answer.

    Raises:
        EnvironmentUnavailableError: the server cannot be reached.
        EnvironmentServerError: the address is not an OpenEnv server's.
    """
    import aiohttp

    async with aiohttp.ClientSession(headers=headers) as http:
        async with failures(url, timeout_s):
            closing = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE, timeout=closing)
        async with socket:
            session = OpenEnvSession(url, http, socket, timeout_s)
            pings = asyncio.create_task(session.send_pings())
            try:
                yield session
                await session.close()
            finally:
                pings.cancel()


def is_tool_schema(schema: JsonObject) -> bool:
    """Return True if actions of this JSON schema are calls of MCP tools."""
    return any(word in json.dumps(schema) for word in TOOL_ACTIONS) or set(fields_of(schema)) == set()


def fields_of(schema: JsonObject) -> JsonObject:
    """Return the properties of an action's JSON schema, without its metadata."""
    return {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}


def action_parser(schema: JsonObject) -> Callable[[str], JsonObject]:
    """Return a function that makes an action of a JSON schema from the model's answer."""
    fields = fields_of(schema)
    required = [name for name in schema.get("required", fields) if name in fields] or list(fields)

    def parse(text: str) -> JsonObject:
        if len(required) == 1:
            (name,) = required
            kind = fields[name].get("type")
            return {name: text if kind in ("string", None) else read_json(text, kind)}
        return read_json(text, f"object with {', '.join(required)}", dict)

    return parse


def read_json(text: str, what: str, expected: type = object) -> Any:
    """Return the value of a JSON text; a ValueError with a message for the model if it has none."""
    value = parse_json(text)
    if value is None or not isinstance(value, expected):
        raise ValueError(f"answer with JSON: {what}")
    return value


def observation_text(observation: JsonObject) -> str:
    """Return an observation as text: the value of its only field, or all as JSON, without the metadata."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields)


def tool_text(result: Any) -> str:
    if isinstance(result, dict) and "data" in result:  # the result of fastmcp
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)
