"""Episode of an OpenEnv server over its WebSocket protocol: reset, step, state, close.

Source of the messages: `openenv.core.env_server` of the package openenv 0.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from raylight.errors import EnvironmentServerError, EnvironmentUnavailableError

MAX_MESSAGE = 100 * 1024 * 1024
"""Bytes of the longest message, as in OpenEnv's own client."""
CLOSE_S = 2.0
"""Time in which the server must answer the end of a connection."""
SPOKEN = "raylight speaks the WebSocket protocol of openenv 0.10"


class InvalidActionError(Exception):
    """The server does not accept an action: a mistake of the model, which reads the message."""


class EpisodeStep(BaseModel):
    """Answer to a reset or an action."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class ServerMessage(BaseModel):
    """Message of the server. Its data depends on the type."""

    type: str
    data: dict[str, Any]


class OpenEnvSession:
    """One environment on the server, for one episode. Made by `open_session`.

    All methods raise EnvironmentUnavailableError if the server does not answer in time or closes the
    connection, and EnvironmentServerError if it reports an error or its answer is not of OpenEnv's protocol.
    """

    def __init__(self, url: str, http: Any, socket: Any, timeout_s: float) -> None:
        self._url = url
        self._http = http
        self._socket = socket
        self._timeout_s = timeout_s

    async def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the environment's actions."""
        async with self._failures(), self._http.get(f"{self._url}/schema") as response:
            found = await response.json(content_type=None) if response.status == 200 else None
        action = found.get("action") if isinstance(found, dict) else None
        if not isinstance(action, dict):
            raise EnvironmentServerError(
                f"{self._url}/schema of the OpenEnv server has no action schema (status {response.status}); "
                "give openenv_agent(parse=...), which makes an action from the model's answer"
            )
        return action

    async def reset(self, parameters: Mapping[str, Any]) -> EpisodeStep:
        """Begin an episode."""
        return self._step(await self._ask("reset", dict(parameters)))

    async def step(self, action: Mapping[str, Any]) -> EpisodeStep:
        """Execute an action.

        Raises:
            InvalidActionError: the action does not fit the environment's schema.
        """
        return self._step(await self._ask("step", dict(action)))

    async def state(self) -> dict[str, Any]:
        """Return the state of the episode."""
        return await self._ask("state", None)

    async def close(self) -> None:
        """End the episode. The server ends the environment."""
        with contextlib.suppress(ConnectionError, RuntimeError):  # the connection is closed
            await self._socket.send_str(json.dumps({"type": "close"}))

    async def _ask(self, kind: str, data: dict[str, Any] | None) -> dict[str, Any]:
        try:
            message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        except (TypeError, ValueError) as error:
            raise EnvironmentServerError(
                f"the {kind} of the OpenEnv server {self._url} needs JSON, and got {data!r:.200}: {error}"
            ) from None
        async with self._failures():
            await self._socket.send_str(message)
            frame = await self._socket.receive()
        return self._read("observation" if kind in ("reset", "step") else kind, frame)

    def _read(self, expected: str, frame: Any) -> dict[str, Any]:
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

    def _error(self, data: dict[str, Any]) -> Exception:
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

    def _step(self, data: dict[str, Any]) -> EpisodeStep:
        try:
            return EpisodeStep.model_validate(data)
        except ValidationError:
            raise EnvironmentServerError(
                f"the OpenEnv server {self._url} sent no observation with reward and done: {data!r:.200}; "
                f"{SPOKEN}"
            ) from None

    @contextlib.asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        with failures(self._url, self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                yield


@contextlib.contextmanager
def failures(url: str, timeout_s: float) -> Any:
    """Convert the errors of connections in a block."""
    import aiohttp

    try:
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
            f"{url}/ws is no WebSocket (status {error.status}: {error.message}); give the address of a "
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
        EnvironmentServerError: the address is not that of an OpenEnv server.
    """
    import aiohttp

    async with aiohttp.ClientSession(headers=headers) as http:
        with failures(url, timeout_s):
            async with asyncio.timeout(timeout_s):
                socket = await http.ws_connect(
                    f"{url}/ws",
                    max_msg_size=MAX_MESSAGE,
                    heartbeat=20.0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                )
        async with socket:
            session = OpenEnvSession(url, http, socket, timeout_s)
            yield session
            await session.close()
