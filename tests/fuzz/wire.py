"""HTTP over a socket, byte by byte: requests that no client library would send."""

import asyncio
import contextlib
import http.client
import io
import re
from dataclasses import dataclass
from typing import Any

from mutations import FuzzCase

ANSWER_S = 60.0
"""Longest wait for an answer; a request that is answered takes well under a second."""
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
HALF_SENT_S = 0.05
"""Time after which a client that has sent half a request disconnects."""


@dataclass(frozen=True)
class WireAnswer:
    """An answer.

    Attributes:
        status: HTTP status; 0 if the server closed the connection without an answer.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


async def send(host: str, port: int, prefix: str, key: str, case: FuzzCase) -> WireAnswer | None:
    """Send a request, and return its answer; None if the client disconnected before.

    Raises:
        TimeoutError: there was no answer in time.
    """
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for piece in _pieces(prefix, key, case, f"{host}:{port}"):
                writer.write(piece)
                await writer.drain()
            if case.sending == "half":
                await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=HALF_SENT_S)
                return None
            if case.sending == "leaves":
                await reader.read(200)
                return None
            if case.sending == "too short":
                writer.write_eof()
            return _read(await _read_all(reader), case.method)
        except (ConnectionError, BrokenPipeError):  # the server may close while the client still sends
            return WireAnswer(0, {}, b"")
        finally:
            writer.transport.abort()


def _pieces(prefix: str, key: str, case: FuzzCase, host: str) -> list[bytes]:
    """Return the bytes of a request in the pieces in which they are sent."""
    length = len(case.content) + {"too short": 50, "too long": -10}.get(case.sending, 0)
    chunked = case.sending in ("chunked", "bad chunks")
    framing = ("transfer-encoding", "chunked") if chunked else ("content-length", str(max(length, 0)))
    headers = [("host", host), ("authorization", f"Bearer {key}"), ("connection", "close")]
    if case.content or case.method == "POST":
        headers.append(framing)
    given = {name for name, _ in case.headers}
    lines = [f"{name}: {value}" for name, value in headers if name not in given]
    lines += [f"{name}: {value}" for name, value in case.headers]
    target = case.target if case.target.startswith(("http:", "*")) else prefix + case.target
    head = "\r\n".join([f"{case.method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1", "replace")
    content = case.content
    if case.sending == "half":
        return [head, content[: len(content) // 2]]
    if case.sending == "slow headers":
        return [head[:20], head[20:40], head[40:], content]
    if case.sending == "bad chunks":
        return [head, b"zz\r\n", content, b"\r\n0\r\n\r\n"]
    if case.sending == "chunked":
        cuts = [content[i : i + 97] for i in range(0, min(len(content), 970), 97)]
        cuts += [content[970:]] if len(content) > 970 else []
        return [head, b"".join(b"%x\r\n%s\r\n" % (len(cut), cut) for cut in cuts) + b"0\r\n\r\n"]
    return [head, content]


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Read an answer: up to its length, or until the server closes the connection.

    A mutated header may keep the connection open. A reset after the answer leaves what has arrived.
    """
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(2**16):
            received += piece
            head, end, body = received.partition(b"\r\n\r\n")
            length = LENGTH.search(head) if end else None
            if length is not None and len(body) >= int(length[1]):
                break
    return bytes(received)


class _Received:
    """Socket of received bytes, as `http.client` reads it."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._content)


def _read(content: bytes, method: str) -> WireAnswer:
    if not content:
        return WireAnswer(0, {}, b"")
    response = http.client.HTTPResponse(_Received(content), method=method)  # type: ignore[arg-type]
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return WireAnswer(response.status, headers, response.read())
