"""The transports of vLLM: its trainer engines, which need GPUs.

They follow vLLM's documented interface. They have been read, not run, where no GPU was at hand.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from raylight.errors import ConfigError, WeightSyncError
from raylight.weights.protocol import SenderSettings, SyncClient, WeightStream

T = TypeVar("T")


class VllmSender:
    """A `WeightSender` around a trainer engine of vLLM."""

    def __init__(self, info: object, client: SyncClient | DeferredFailures, source: WeightStream) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        def open_engine() -> Any:
            return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

        self._client = client
        self._engine = _as_connection_error(open_engine)

    def send_weights(self) -> None:
        _as_connection_error(self._engine.send_weights)
        if isinstance(self._client, DeferredFailures):
            self._client.raise_failure()

    def shutdown(self) -> None:
        self._engine.shutdown()


class DeferredFailures:
    """A `SyncClient` of vLLM's ipc engine, whose ranks meet after every buffer: if rank 0 left at the first
    failure, the others would wait for it. It calls no engine after the failure, which `raise_failure` raises.
    """

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self._failure: Exception | None = None
        self.init_weight_transfer_engine = client.init_weight_transfer_engine

    def start_weight_update(self) -> None:
        self._try(self._client.start_weight_update)

    def update_weights(self, update_info: object) -> None:
        self._try(lambda: self._client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._try(self._client.finish_weight_update)

    def raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _try(self, call: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                call()
            except (WeightSyncError, ConnectionError) as error:
                self._failure = error


def open_nccl(settings: SenderSettings, client: SyncClient, source: WeightStream) -> VllmSender:
    """Send by one NCCL broadcast from rank 0, in packed buffers.

    vLLM's communicator has no timeout: a learner that waits for a lost engine is restarted when the
    publication's time is over.
    """
    _check_vllm("nccl")
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    port = _free_port(settings.host) if settings.rank == 0 else 0
    return VllmSender(
        NCCLTrainerInitInfo(
            master_address=settings.host,
            master_port=port,
            world_size=settings.world_size,
            rank=settings.rank,
        ),
        client,
        source,
    )


def open_ipc(settings: SenderSettings, client: SyncClient, source: WeightStream) -> VllmSender:
    """Send handles of GPU memory, a buffer at a time, to engines on the learners' GPUs.

    The buffer holds the largest tensor at least.
    """
    _check_vllm("ipc")
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

    largest = max(param.dtype.itemsize * math.prod(param.shape) for param in source.metadata())
    return VllmSender(
        IPCTrainerInitInfo(
            packed=True,
            packed_buffer_size_bytes=max(largest, DEFAULT_PACKED_BUFFER_SIZE_BYTES),
            rank=settings.rank,
        ),
        DeferredFailures(client),
        source,
    )


def open_sharded_rdt(settings: SenderSettings, client: SyncClient, source: WeightStream) -> VllmSender:
    """Let each worker pull only the shards that it needs, over Ray Direct Transport.

    It needs `distributed_executor_backend="ray"` in `engine.args`, and the package nixl.
    """
    _check_vllm("sharded_rdt")
    import ray
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

    consumers = sum(settings.workers)
    same_size = len(set(settings.workers)) == 1
    return VllmSender(
        ShardedRDTTrainerInitInfo(
            num_consumers=consumers,
            workers_per_replica=settings.workers[0] if same_size else consumers,
            trainer_actor_namespace=ray.get_runtime_context().namespace,
            rank=settings.rank,
        ),
        client,
        source,
    )


def _check_vllm(name: str) -> None:
    """Raise a ConfigError if this process cannot import vLLM, or has no GPU."""
    try:
        import vllm.distributed.weight_transfer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"EngineConfig.weight_transfer={name!r}: the learners use vLLM's side of the transfer, and vLLM "
            f"cannot be imported on their node ({error}); install it there too, or set it to 'gloo'"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"EngineConfig.weight_transfer={name!r}: torch finds no GPU on the learners' node; "
            "install a build of torch for GPUs there, or set it to 'gloo'"
        )


def _as_connection_error(call: Callable[[], T]) -> T:
    """Call, and raise NCCL's errors as a ConnectionError."""
    try:
        return call()
    except RuntimeError as error:
        if "NCCL" in str(error):
            raise ConnectionError(f"the connection to the engines was lost: {error}") from error
        raise


def _free_port(host: str) -> int:
    """Return a port on which vLLM can open its store."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return listener.getsockname()[1]
