"""An HTTP proxy that counts requests, and an outside model that only the proxy can reach."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

OUTSIDE = "outside.example"
"""Host of the model outside; no name server resolves it."""
PROXY_VARIABLES = [
    name for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())
]


class OutsideHandler(BaseHTTPRequestHandler):
    """Answers chat completions, messages and everything else with "outside"."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        common = {"id": "1", "model": "m", "role": "assistant"}
        message = {"role": "assistant", "content": "outside"}
        chat = {"object": "chat.completion", "created": 1}
        body = common | chat | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        if self.path.endswith("/messages"):
            text, usage = {"type": "text", "text": "outside"}, {"input_tokens": 1, "output_tokens": 1}
            body = common | {"type": "message", "stop_reason": "end_turn", "content": [text], "usage": usage}
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args: Any) -> None: ...


class CountingProxy:
    """Proxy for absolute URLs and for CONNECT.

    Attributes:
        url: its own URL.
        seen: host and port of each request, in their order.
    """

    def __init__(self, outside_port: int) -> None:
        self.url = ""
        self.seen: list[str] = []
        self._outside_port = outside_port
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of an environment behind this proxy, without exceptions."""
        return dict.fromkeys(PROXY_VARIABLES, self.url) | {"NO_PROXY": "", "no_proxy": ""}

    async def serve(self, ready: threading.Event, ended: asyncio.Event) -> None:
        """Forward requests until the event `ended`."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await ended.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            line, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
            method, target, version = line.split(" ")
            parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
            host, port = parts.hostname or "", parts.port or 80
            self.seen.append(f"{host}:{port}")
            address = ("127.0.0.1", self._outside_port) if host == OUTSIDE else (host, port)
            far_reader, far_writer = await asyncio.open_connection(*address)
            with contextlib.closing(far_writer):
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:  # one request for each connection
                    path = parts._replace(scheme="", netloc="").geturl() or "/"
                    kept = [one for one in headers if "connection:" not in one.lower()]
                    head = [f"{method} {path} {version}", *kept, "Connection: close", "", ""]
                    far_writer.write("\r\n".join(head).encode("latin-1"))
                sending = asyncio.ensure_future(_pump(reader, far_writer))
                try:
                    await _pump(far_reader, writer)
                finally:
                    sending.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@contextlib.contextmanager
def counting_proxy() -> Iterator[CountingProxy]:
    """Yield a proxy that runs in a thread, before a model outside."""
    outside = ThreadingHTTPServer(("127.0.0.1", 0), OutsideHandler)
    outside.daemon_threads = True
    proxy, ready, ended = CountingProxy(outside.server_port), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    threads = [
        threading.Thread(target=outside.serve_forever, kwargs={"poll_interval": 0.01}),
        threading.Thread(target=loop.run_until_complete, args=(proxy.serve(ready, ended),)),
    ]
    for thread in threads:
        thread.start()
    try:
        assert ready.wait(30), "the proxy listens"
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        outside.shutdown()
        outside.server_close()
        for thread in threads:
            thread.join()
        loop.close()
