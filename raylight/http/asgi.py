"""What several layers do with a request."""

from __future__ import annotations

from starlette.types import Message, Receive


async def read_whole(receive: Receive) -> bytes | None:
    """The body of a request; None if the client left before its end."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def until_left(receive: Receive) -> None:
    """Wait until the client has gone away, after its body."""
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
