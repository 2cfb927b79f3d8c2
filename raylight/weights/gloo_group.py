"""A group of one sender and many receivers of weights, connected by gloo.

The sender is rank 0. A lost or frozen process ends the group for all others: their calls raise
`ConnectionError`, at once when its sockets close, and otherwise after the group's timeout.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

READY, BROKEN = b"ready", b"broken"
GO = "go"


def open_listener(host: str) -> tuple[int, dist.Store]:
    """Open the store of a new group on a free port of `host` only; return the port, and the store.

    torch itself would listen on all interfaces.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return port, store


def close_rendezvous(host: str, port: int, size: int) -> None:
    """End a rendezvous that cannot complete: every process that waits in it raises.

    May be called by another thread than the one that waits.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it the rendezvous
        store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=5))
        for key in [_joined(rank) for rank in range(1, size)] + [GO]:
            store.set(key, BROKEN.decode())


class GlooGroup:
    """A process's part of a group.

    Args:
        store: the sender's store; None for a receiver, which connects to it.
        timeout_s: limit of the rendezvous, and of each transmission.

    Raises:
        ConnectionError: the other processes did not come in time, or the rendezvous was closed.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout_s: float, store: Any = None
    ) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        with _as_connection_error(f"the processes of a weight transfer did not meet at {host}:{port}"):
            self._store = store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
            self._meet(rank, size, timeout)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
            mesh = dist.PrefixStore("mesh", self._store)
            self._group: Any = dist.ProcessGroupGloo(mesh, rank, size, options)

    def _meet(self, rank: int, size: int, timeout: datetime.timedelta) -> None:
        """Wait until all have come. Only then gloo connects them, which cannot be interrupted."""
        if rank:
            self._store.set(_joined(rank), READY.decode())
            awaited = [GO]
        else:
            awaited = [_joined(other) for other in range(1, size)]
        for key in awaited:
            self._store.wait([key], timeout)
            if self._store.get(key) != READY:
                raise ConnectionError("another process was lost")
        if rank == 0:
            self._store.set(GO, READY.decode())

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous CPU tensors on rank 0, and receive into them on the others.

        Raises:
            ConnectionError: a process was lost, or did not respond in time.
        """
        with _as_connection_error("the connection to the other processes of a weight transfer was lost"):
            if self._group is None:
                raise ConnectionError("it was closed")
            works = [
                self._group.broadcast([tensor.view(-1).view(torch.uint8)], dist.BroadcastOptions())
                for tensor in tensors
                if tensor.numel()
            ]
            try:
                while works:
                    works.pop(0).wait()
            finally:  # works keep the connections open, and an error keeps this frame
                works.clear()

    def close(self) -> None:
        self._group = self._store = None


@contextlib.contextmanager
def _as_connection_error(message: str) -> Iterator[None]:
    """Raise torch's errors of communication as a ConnectionError."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:  # gloo's and the store's errors are RuntimeErrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConnectionError(f"{message}: {reason}") from error


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _own_address(host: str, port: int) -> str:
    """Return this process's address on the interface that leads to `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # a datagram socket: nothing is sent
        probe.connect(address)
        return str(probe.getsockname()[0])
