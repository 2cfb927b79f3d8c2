"""Middleware that accepts any model name from an attempt, and answers with the model that is served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylight.engines.capture_context import REQUESTED_MODEL_KEY, SCOPE
from raylight.http.request import JsonRequest, json_request
from raylight.http.sse import is_event_stream
from raylight.types import JsonObject

MODELS = "/v1/models"
"""Path of the list of models."""
MODEL_FIELD = re.compile(rb'"model": ?"(?:[^"\\]|\\.)*"')
"""The model in an event. In JSON within JSON, such as the arguments of a call, the quotes are escaped."""


async def list_models(app: ASGIApp, scope: Scope, receive: Receive) -> list[JsonObject]:
    """Return the engine's entries of `/v1/models`; none if it has no such route.

    Args:
        scope: of any request; its path and method are replaced.
    """
    body = bytearray()

    async def collect(message: Message) -> None:
        body.extend(message.get("body", b""))

    await app({**scope, "path": MODELS, "raw_path": MODELS.encode(), "method": "GET"}, receive, collect)
    try:
        entries = json.loads(body)["data"]
    except (ValueError, TypeError, KeyError):  # an engine of the user's own, without this route
        return []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def describe_model(entry: JsonObject) -> JsonObject:
    """Return an entry of the list with the fields that Anthropic's and OpenAI's clients read."""
    created = datetime.fromtimestamp(entry.get("created") or 0, UTC)
    anthropic = {
        "type": "model",
        "display_name": entry.get("id"),
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return anthropic | entry


def model_in_place_of(name: str, default: str, served: list[str]) -> str:
    """Return the served model that answers for a name: itself, the first adapter by name, or `default`. A
    pinned version of an adapter, with "@" in its name, answers for itself only."""
    adapters = sorted(other for other in served if other != default and "@" not in other)
    return name if name in served else next(iter(adapters), default)


class AnyModelName:
    """Accepts any model name from an attempt, since harnesses hard-code model names for some calls.

    The served model answers, under the requested name. The scope has this name as `REQUESTED_MODEL_KEY`, so
    that the call is recorded as an auxiliary one.

    Args:
        model: name under which the engine serves its model.
        count: called for each such request.
    """

    def __init__(self, app: ASGIApp, model: str, count: Callable[[], None]) -> None:
        self._app = app
        self._model = model
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if SCOPE.get() is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = (await json_request(scope, receive)).with_receive(receive)
        name = request.fields.get("model")
        if not isinstance(name, str) or not name or name == self._model:
            await self._app(request.put_into(scope), request, send)
            return
        served = [entry["id"] for entry in await list_models(self._app, scope, receive)]
        model = model_in_place_of(name, self._model, served)
        if model == name:
            await self._app(request.put_into(scope), request, send)
            return
        self._count()
        scope = {**scope, REQUESTED_MODEL_KEY: name}
        renamed = JsonRequest(request.fields | {"model": model}, receive)
        await self._app(renamed.put_into(scope), renamed, _RenamingSend(send, name))


class _RenamingSend:
    """An ASGI `send` that puts the requested name in place of the served model's into an answer."""

    def __init__(self, send: Send, name: str) -> None:
        self._send = send
        self._name = name
        self._replacement = b'"model":' + json.dumps(name).encode()
        self._start: Message | None = None
        self._streams = False
        self._unsent = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = is_event_stream(message)
            self._start = None if self._streams or message["status"] >= 400 else message
            if self._start is None:
                await self._send(message)
        elif self._start is not None:
            await self._send_whole(message)
        elif self._streams:
            await self._send_lines(message)
        else:
            await self._send(message)

    async def _send_whole(self, message: Message) -> None:
        """Send a JSON answer when it is complete."""
        assert self._start is not None
        self._unsent += message.get("body", b"")
        if message.get("more_body", False):
            return
        answer = json.loads(self._unsent)
        if isinstance(answer, dict) and "model" in answer:
            self._unsent = json.dumps(answer | {"model": self._name}).encode()
        headers = [pair for pair in self._start.get("headers", []) if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(self._unsent)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._unsent, "more_body": False})

    async def _send_lines(self, message: Message) -> None:
        """Send the complete lines of a stream."""
        more = message.get("more_body", False)
        head, newline, self._unsent = (self._unsent + message.get("body", b"")).rpartition(b"\n")
        lines = head + newline
        if not more:
            lines, self._unsent = lines + self._unsent, b""
        if lines or not more:
            body = b"\n".join(map(self._rename_event, lines.split(b"\n")))
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _rename_event(self, line: bytes) -> bytes:
        return MODEL_FIELD.sub(lambda _: self._replacement, line, count=1)
