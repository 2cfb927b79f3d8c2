"""The HTTP endpoint of an engine in this process."""

import asyncio

import pytest

from raylight.config import EngineConfig
from raylight.errors import PortInUseError
from raylight.serving.local_endpoint import Endpoint
from raylight.store.client import StoreClient
from raylight.store.service import StoreService


async def test_a_port_in_use_is_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = EngineConfig(host="127.0.0.1", port=port)
    async with server:
        with pytest.raises(PortInUseError, match=str(port)):
            async with Endpoint(None, StoreClient(StoreService()), "secret", config):  # type: ignore[arg-type]
                pass
