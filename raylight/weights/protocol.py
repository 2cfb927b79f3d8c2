"""Both sides of a weight transfer in the terms of vLLM's protocol, without an import of vLLM.

The sender drives four phases on all engines: `init_weight_transfer_engine` once for a set of engines, and for
each version `start_weight_update`, `update_weights` and `finish_weight_update`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raylight.errors import WeightSyncError
from raylight.types import JsonObject

UpdateMode = Literal["keep", "wait", "abort"]
"""Handling of requests in flight during a weight update: "keep" continues them with the new weights (each
token records its own version), "wait" delays the update until they have finished, "abort" ends them
immediately with the finish reason "abort"."""


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter as peft saves it.

    Attributes:
        config: the content of `adapter_config.json`.
        weights: name to array, as in `adapter_model.safetensors`.
    """

    config: JsonObject
    weights: Mapping[str, Any]


@dataclass(frozen=True)
class EngineLoad:
    """Requests and cache use of one engine at one moment. The defaults stand for an engine without a cache of
    its own.

    Attributes:
        kv_use: share of the key-value cache that is in use, 0 to 1.
        running: requests that are being sampled.
        waiting: requests that the engine has accepted and not begun, or has preempted.
        preemptions: times since the engine's start that a request lost its place in the cache to others.
        capacity: tokens that the key-value cache holds; 0 if not known.
        paused: True while the engine samples nothing because its weights change or it sleeps.
        idle_s: seconds since the engine's start in which it had no request. The replica measures them.
    """

    kv_use: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    capacity: int = 0
    paused: bool = False
    idle_s: float = 0.0


class SyncedEngine(Protocol):
    """Methods of an engine that weight synchronisation calls; see `raylight.engines.protocol.Engine`.

    The defaults fit an engine with fixed weights.
    """

    workers: int = 1
    """Number of processes that receive weights."""
    not_trainable: str = "this engine's model cannot be trained: the engine takes no weights"
    """Error message for every attempt to change or probe fixed weights."""

    async def init_weight_transfer_engine(self, info: Mapping[str, object]) -> None:
        """Join the group of the sender and all engines, and leave an earlier one.

        Args:
            info: what the transport needs; the first worker's rank is `rank_offset`.

        Raises:
            ConnectionError: the other processes did not come.
            WeightSyncError: the engine has no weights.
        """
        raise WeightSyncError(self.not_trainable)

    async def start_weight_update(self, mode: UpdateMode = "keep") -> None:
        """Stop sampling, and prepare for new weights."""
        raise WeightSyncError(self.not_trainable)

    async def update_weights(self, info: object) -> None:
        """Receive weights.

        Args:
            info: what the transport needs, such as the names and shapes of the tensors.

        Raises:
            ConnectionError: a process that takes part in the transfer was lost.
            WeightSyncError: a tensor is missing, unknown or of another shape.
        """
        raise WeightSyncError(self.not_trainable)

    async def finish_weight_update(self, version: int) -> None:
        """Sample with the new weights, which are numbered `version`, from now on."""
        raise WeightSyncError(self.not_trainable)

    async def abort_weight_update(self) -> None:
        """Leave the transfer; an update that has begun to load weights stays incomplete.

        Sampling continues if no weights were loaded. Without effect if no transfer is open.
        """
        return None

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        """Serve an adapter as the model `name`, replacing its previous version.

        Under the name of the model itself, requests for the model are served with the adapter from then on.
        Under "keep", requests in flight finish with the version that they started with.

        Raises:
            WeightSyncError: the adapter does not fit the model, or the engine supports no adapters.
        """
        raise WeightSyncError(self.not_trainable)

    async def drop_adapter(self, name: str) -> None:
        """Stop serving the model `name`; unknown names are ignored."""
        return None

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-probs of `ids[1:]`, each given the ids before it.

        Args:
            temperature: sampling temperature of the distribution, above 0.

        Raises:
            WeightSyncError: the engine cannot compute them.
        """
        raise WeightSyncError(self.not_trainable)

    async def sleep(self, level: int = 1) -> str | None:
        """Free the device's memory until `wake`; requests wait meanwhile.

        Returns the reason if nothing was freed, else None.
        """
        return "the engine holds no weights in this process"

    async def wake(self) -> None:
        """Resume after `sleep`."""
        return None


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

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def send(self, update_info: object) -> None:
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

    def receive(self, info: Mapping[str, object]) -> Iterator[list[tuple[str, Any]]]:
        """Yield the names and tensors of one layer group after the other."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...
