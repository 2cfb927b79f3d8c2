"""The server of `raylight ui`."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from raylight._utils.no_proxy import LOOPBACK
from raylight.errors import ConfigError
from raylight.http.slow_clients import ImpatientProtocol
from raylight.ui.app import build_app

DEFAULT_PORT = 7860
PORTS_TRIED = 50
"""Ports after the default one that are tried, if no port was asked for."""
GRACE_S = 1
"""Seconds for which a stopping server waits for event streams, which do not end by themselves."""


def serve_ui(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    key: str | None = None,
    until_closed: bool = False,
    show: Callable[[str], None] = print,
) -> None:
    """Serve the pages until Ctrl-C.

    Args:
        paths: run directories, and folders of them.
        host: address to listen on. Any but loopback needs a key.
        port: None for the first free one from DEFAULT_PORT on.
        key: key that visitors must have. None: none on loopback, and a new one elsewhere.
        until_closed: end with the standard input, and so with the process that writes it.
        show: receives the address.

    Raises:
        ConfigError: a path does not exist, the key is empty, or the port is taken.
    """
    server, listener, address = _prepare(paths, host, port, key)
    if until_closed:
        show(f"the run is shown at {address}")
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    else:
        show(f"raylight ui: {address} (press Ctrl-C to stop)")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.read()
    server.should_exit = True


def _prepare(
    paths: Sequence[Path], host: str, port: int | None, key: str | None
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Return a server, the socket that it listens on, and the address of its first page."""
    if key == "":
        raise ConfigError("the key of raylight ui is empty; give one, or leave --key and RAYLIGHT_UI_KEY out")
    if key is None and host not in LOOPBACK:
        key = secrets.token_urlsafe(24)
    app = build_app(paths, key)
    listener = _listen(host, port)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=GRACE_S, lifespan="on", http=ImpatientProtocol
    )
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
    return uvicorn.Server(config), listener, f"{address}?key={key}" if key else address


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket on a port, or on the first free one.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """
    tried = [port] if port is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    problem: OSError | None = None
    for number in tried:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, number), family=family, backlog=256)
        except OSError as error:
            problem = error
    raise ConfigError(
        f"raylight ui cannot listen on {host} port {tried[0]}: {problem}; choose another --host or --port"
    )
