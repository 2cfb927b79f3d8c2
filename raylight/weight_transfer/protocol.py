"""The parts of a weight transfer, in the terms of vLLM's protocol; the module imports no vLLM.

The sender drives four phases on all engines: `init_weight_transfer_engine` once for a set of engines, and for
each version `start_weight_update`, `update_weights` and `finish_weight_update`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class SenderSettings:
    """Settings of the learners' side of a transfer.

    Attributes:
        rank: rank of this learner; rank 0 sends.
        host: address of rank 0 that all engines can reach.
        workers: number of worker processes of each engine that receives.
        timeout_s: time that a version may take to reach all engines.
    """

    rank: int
    host: str
    workers: tuple[int, ...]
    timeout_s: float

    @property
    def world_size(self) -> int:
        """Number of processes that communicate: the sender and all workers."""
        return 1 + sum(self.workers)


class WeightStream(Protocol):
    """The weights of a model as a stream; the part of vLLM's `WeightSource` that is used here.

    Iterating is a collective of the ranks that share the model.
    """

    def metadata(self) -> list[Any]:
        """Return the name, dtype and shape of each tensor, in the order of the stream."""
        ...

    def groups(self) -> list[list[str]]:
        """Return the names of the tensors by layer group."""
        ...

    def iter_groups(self) -> Iterator[tuple[list[str], list[Any]]]:
        """Yield the names and tensors of one layer group at a time."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class SyncClient(Protocol):
    """Control of all engines, for the sender; vLLM's `VLLMWeightSyncClient` and `send`.

    Each method returns when all engines have executed the phase.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def send(self, update_info: Any) -> None:
        """Have all engines start, receive one update, and finish, in one call."""
        ...


class WeightSender(Protocol):
    """The learners' side of a transfer, which stays open for the versions to come.

    Each method is a collective of all learner ranks.
    """

    def send_weights(self) -> None:
        """Send the current weights to all engines, and drive the phases of the update."""
        ...

    def shutdown(self) -> None:
        """Close the connections."""
        ...


class WeightReceiver(Protocol):
    """An engine's side of a transfer, for an engine whose weights are in one process."""

    def init(self, info: Mapping[str, Any], worker: int = 0) -> None:
        """Join the sender's group."""
        ...

    def receive(self, info: Mapping[str, Any]) -> Iterator[list[tuple[str, Any]]]:
        """Yield the names and tensors of one layer group after the other."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...
