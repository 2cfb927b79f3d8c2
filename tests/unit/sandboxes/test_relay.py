"""Addresses that programs in sandboxes are given."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from raylight._utils.machine import SOCKET_PATH_LENGTH
from raylight.sandboxes.relay import UnixRelay, reach_of


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("127.0.0.1:8000", "machine"),
        ("localhost", "machine"),
        ("[::1]:80", "machine"),
        ("10.0.0.7", "network"),
        ("0.0.0.0", "network"),
        ("head-node:8000", "network"),
        ("8.8.8.8", "internet"),
        ("model.example.com", "internet"),
    ],
)
def test_the_reach_of_an_address(host: str, reach: str) -> None:
    assert reach_of(f"http://{host}/v1") == reach


@pytest.mark.parametrize("length", [0, SOCKET_PATH_LENGTH])
async def test_a_relay_listens_in_folders_of_any_length(length: int, tmp_path: Path) -> None:
    """`TMPDIR` may be longer than the path of a socket can be; a sandbox sees a short one."""
    folder = tmp_path / ("x" * length)
    folder.mkdir(exist_ok=True)
    model = await asyncio.start_server(answer, "127.0.0.1", 0)
    relay = UnixRelay(str(folder / "relay.sock"), f"http://127.0.0.1:{model.sockets[0].getsockname()[1]}")
    await relay.start()
    inside = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, f"/proc/self/fd/{inside}/relay.sock")
        assert await asyncio.get_running_loop().sock_recv(client, 9) == b"the model"
    os.close(inside)
    await relay.stop()
    model.close()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"the model")
    await writer.drain()
    writer.close()
