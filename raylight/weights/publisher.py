"""The learners' side of publications: each rank iterates the weights, and rank 0 sends them to engines."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist

from raylight.errors import WeightSyncError
from raylight.weights.orders import Member
from raylight.weights.protocol import SenderSettings, WeightSender
from raylight.weights.sender import PublicationSettings, SenderClient
from raylight.weights.source import WeightSource
from raylight.weights.transports import open_sender

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

SENDING_TIMEOUT = datetime.timedelta(days=1)
"""Longest wait of the ranks for rank 0, which waits for the engines. `sync_timeout_s` ends a publication
earlier, and the death of a rank at once."""
MAX_ATTEMPTS = 3
"""Number of transfers in a row to the same replicas that may break before a publication fails."""


class WeightPublisher:
    """Sends the weights of a module to the replicas that lack them, as often as replicas are lost meanwhile.

    The connections stay open for the next version as long as the replicas are the same. Every method is a
    collective of all ranks, as is making a publisher.

    Args:
        module: the sharded model.
    """

    def __init__(self, module: torch.nn.Module, settings: PublicationSettings) -> None:
        self._settings = settings
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=SENDING_TIMEOUT)
        """Connections that an update does not use."""
        self._weights = WeightSource(module, getattr(torch, settings.dtype), names=settings.names)
        self._source = LockstepSource(self._weights)
        self.snapshot_version = -1
        """Version of the weights in the snapshot; -1 if there is none."""
        # a separate stream does not wait for the kernels of an update
        separate = settings.during_updates and torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if separate else None
        self._client = SenderClient(settings)
        self._sender: WeightSender | None = None
        self._members: list[Member] = []

    def take_snapshot(self, version: int) -> None:
        """Copy the weights, which are sent from now on."""
        self._weights.take_snapshot()
        self.snapshot_version = version

    def publish(self, version: int, token: str) -> None:
        """Send the current weights, or the snapshot's, to the replicas that lack them.

        Args:
            version: number of the weights.
            token: the publication's; empty for replicas that joined after it.

        Raises:
            WeightSyncError: on rank 0, several transfers in a row broke, or the coordinator is gone.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._publish(version, token)

    def _publish(self, version: int, token: str) -> None:
        attempts, last = 0, None
        while True:
            members, error = self._on_rank_0(lambda: self._client.begin(version, token))
            if error is not None and self._rank == 0:
                raise error
            if not members:
                return
            attempts = attempts + 1 if members == last else 1
            last = members
            error = self._transfer(members)
            if error is None:
                attempts = 0
                continue
            logger.warning("a transfer of version %d broke: %s", version, error)
            if attempts == MAX_ATTEMPTS:
                if self._rank == 0:
                    raise _too_many_attempts(version, members, error)
                return

    def _transfer(self, members: list[Member]) -> Exception | None:
        """Send the weights to replicas; return the reason if the transfer broke."""
        if self._sender is None or members != self._members:
            self._close()
            self._sender, error = self._open(members)
            if error is not None:
                return error
            self._members = members
        self._source.restart()
        sender = self._sender
        if self._rank:
            sender.send_weights()
        _, error = self._on_rank_0(sender.send_weights, on_failure=self._source.drain)
        if error is not None:
            self._close()
        return error

    def _open(self, members: list[Member]) -> tuple[Any, Exception | None]:
        own = ray.util.get_node_ip_address()
        settings = SenderSettings(
            rank=self._rank,
            host=LOOPBACK if {member.node for member in members} == {own} else own,
            workers=tuple(member.workers for member in members),
            timeout_s=self._settings.timeout_s,
        )

        def open_here() -> WeightSender:
            return open_sender(self._settings.transport, settings, self._client, self._source)

        sender = open_here() if self._rank else None
        opened: list[WeightSender] = []
        _, error = self._on_rank_0(lambda: opened.append(open_here()))
        return (sender or (opened[0] if opened else None)), error

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
        self._sender, self._members = None, []

    def _on_rank_0(
        self, call: Callable[[], T], on_failure: Callable[[], None] = lambda: None
    ) -> tuple[T | None, Exception | None]:
        """Call on rank 0; return its result and its failure on all ranks."""
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = call()
            except (WeightSyncError, ConnectionError) as error:
                outcome[1] = error
                on_failure()
        if self._ranks > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        return outcome[0], outcome[1]


class LockstepSource:
    """A source whose stream can be read to its end after a failure.

    Reading it is a collective: a rank that stops amid it would leave the others waiting.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stream: Iterator[tuple[list[str], list[torch.Tensor]]] | None = None
        self.metadata, self.groups, self.held_names = source.metadata, source.groups, source.held_names

    def restart(self) -> None:
        """Expect a new stream."""
        self._stream = None

    def drain(self) -> None:
        """Read the rest of the stream, all of it if it was not begun."""
        for _ in self._stream or self._source.iter_groups():
            pass

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        self._stream = self._source.iter_groups()
        return self._stream

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for names, tensors in self.iter_groups():
            while names:
                yield names.pop(0), tensors.pop(0)


def _too_many_attempts(version: int, members: list[Member], error: Exception) -> WeightSyncError:
    replicas = ", ".join(member.replica for member in members)
    return WeightSyncError(
        f"version {version} could not be sent: {MAX_ATTEMPTS} transfers in a row to {replicas} broke, the "
        f"last one because {error}. Check the network between learners and engines"
    )
