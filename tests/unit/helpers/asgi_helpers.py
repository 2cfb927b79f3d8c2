"""Messages of ASGI applications, and requests that are sent to one message by message."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from unit_helpers import within

EMPTY_BODY: Message = {"type": "http.request", "body": b"{}", "more_body": False}
"""A whole request with an empty JSON object."""
DISCONNECT: Message = {"type": "http.disconnect"}


def request(content: bytes, more: bool = False) -> Message:
    """Return a request's body, or a piece of it."""
    return {"type": "http.request", "body": content, "more_body": more}


def start(status: int = 200, **headers: str) -> Message:
    """Return the message that starts an answer; underscores in headers' names stand for hyphens."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def stream_start(**headers: str) -> Message:
    """Return the message that starts a stream of events."""
    return start(content_type="text/event-stream", **headers)


def response_body(content: bytes = b"", more: bool = False) -> Message:
    """Return an answer's body, or a piece of it."""
    return {"type": "http.response.body", "body": content, "more_body": more}


def replying(*messages: Message) -> ASGIApp:
    """Return an application that sends the same messages to every request."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


async def talk(
    app: ASGIApp,
    scope: Scope,
    *received: Message,
    sent: list[Message] | None = None,
    silent: bool = False,
) -> list[Message]:
    """Return what an application sends after it receives some messages.

    Args:
        sent: list to which the answer is added as it comes.
        silent: True for a client that sends nothing more, but stays.
    """
    incoming, answers = list(received), [] if sent is None else sent

    async def receive() -> Message:
        if silent and not incoming:
            await asyncio.Event().wait()
        return incoming.pop(0)

    async def send(message: Message) -> None:
        answers.append(message)

    async with within():
        await app(scope, receive, send)
    return answers
