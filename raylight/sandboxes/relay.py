"""The runner's end of a relay: a Unix socket that leads to the model's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from raylight._utils.machine import SOCKET_PATH_LENGTH
from raylight._utils.no_proxy import is_loopback
from raylight.errors import SandboxError
from raylight.sandboxes import relay_inside

INSIDE_PORT = 41763
"""Port of the relay on the loopback of a sandbox, which is its own."""
RELAY_FOLDER = "/run/raylight"
"""Folder of a sandbox with the socket of the relay, and its program for the inside."""
RELAYING = ["python3", "-I", f"{RELAY_FOLDER}/relay.py", f"{RELAY_FOLDER}/relay.sock", str(INSIDE_PORT)]
"""Command that opens the port inside, and becomes the command that follows."""
BUFFER = 65536


def with_address(url: str, host: str, port: int) -> str:
    return urlunsplit(urlsplit(url)._replace(netloc=f"{host}:{port}"))


def address_of(url: str) -> tuple[str, int]:
    """Return the host and port of a URL.

    Raises:
        SandboxError: it has no host, or is encrypted: its certificate would not fit another host name.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise SandboxError(f"only an http:// address can be relayed into a sandbox, not {url!r:.80}")
    return parts.hostname, parts.port or 80


def reach_of(url: str) -> Literal["machine", "network", "internet"]:
    """Return how far a URL reaches: a loopback address, a private address, or any other address or name."""
    if is_loopback(url):
        return "machine"
    host = urlsplit(url).hostname or ""
    try:
        return "internet" if ipaddress.ip_address(host).is_global else "network"
    except ValueError:
        return "internet" if "." in host else "network"


class UnixRelay:
    """Unix socket whose connections are forwarded to one address. It reaches that address and no other."""

    def __init__(self, path: str, url: str) -> None:
        self.path = path
        self._address = address_of(url)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Every user of the machine who can see the socket's folder can connect."""
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            path = self.path
            if len(os.fsencode(path)) > SOCKET_PATH_LENGTH:  # in a long TMPDIR
                path = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
            self._server = await asyncio.start_unix_server(self._accept, path)
        finally:
            os.close(folder)
        os.chmod(self.path, 0o666)

    async def stop(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(*self._address)
            with contextlib.closing(far_writer):
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def start_relay(folder: str, url: str) -> UnixRelay:
    """Start the relay of a sandbox, which sees this folder as `RELAY_FOLDER`."""
    await asyncio.to_thread(shutil.copy, relay_inside.__file__, f"{folder}/relay.py")
    relay = UnixRelay(f"{folder}/relay.sock", url)
    await relay.start()
    return relay


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the reader ends, no faster than the writer takes them."""
    while data := await reader.read(BUFFER):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
