"""Connections that send no whole headers end, and others stay."""

import asyncio
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from unit_helpers import within

import raylight
from raylight.http import slow_clients
from raylight.http.slow_clients import ImpatientProtocol
from raylight.serving.local_endpoint import ThreadServer, listen

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_half_sent_headers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "HEADER_TIMEOUT_S", 0.3)
    listener = listen("127.0.0.1", 0, "the test", "")
    app = PlainTextResponse("answer")
    server = ThreadServer(uvicorn.Config(app, log_level="warning", lifespan="off", http=ImpatientProtocol))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with within(30):
        pairs = [await asyncio.open_connection(*listener.getsockname()) for _ in range(3)]
        (silent, _), (half, half_writer), (reader, writer) = pairs
        half_writer.write(REQUEST[:9])
        for _ in range(2):
            writer.write(REQUEST)
            assert b"answer" in await reader.readuntil(b"answer")
        assert await silent.read() == await half.read() == b""
        writer.write(REQUEST[:9])  # of a third request
        assert await reader.read() == b""
        assert ImpatientProtocol.waiting == {}
        monkeypatch.setattr(slow_clients, "HEADER_TIMEOUT_S", 600)
        monkeypatch.setattr(slow_clients, "max_waiting", lambda: 1)
        first, _ = await asyncio.open_connection(*listener.getsockname())
        _, last = await asyncio.open_connection(*listener.getsockname())
        assert await first.read() == b""
        last.close()
        server.should_exit = True
        await serving


def test_every_server_limits_the_time_of_headers() -> None:
    servers = [
        text
        for file in Path(raylight.__file__).parent.rglob("*.py")
        for text in file.read_text().split("uvicorn.Config(")[1:]
    ]
    assert len(servers) == 3
    assert all("http=ImpatientProtocol" in text[:400] for text in servers)
