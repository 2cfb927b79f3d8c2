"""Extension of vLLM's worker processes for weight transfers, among them by the backend `gloo`.

The module is imported by its dotted name in each worker, which registers the backend.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from raylight.engines.vllm.update_repairs import capture_routes_on_cpu
from raylight.engines.vllm.worker import WorkerExtension, note_start_stages
from raylight.weights.gloo import GlooReceiver

note_start_stages()  # imported before the worker loads its weights
capture_routes_on_cpu()

LOST, FAILED = "lost", "failed"
"""Kinds of failures: another process was lost, or this worker failed."""


class TransferWorkerExtension(WorkerExtension):
    """Mixin of vLLM's worker class. Its methods are called through `collective_rpc`."""

    vllm_config: VllmConfig
    weight_transfer_engine: WeightTransferEngine
    _weight_update_active: bool

    def raylight_transfer(self, phase: str, args: bytes) -> tuple[str, str] | None:
        """Execute a phase of a weight transfer, while nothing is scheduled.

        Returns the kind and the reason of a failure, or None. It raises nothing: vLLM's executor does not
        read the responses of the workers after the first one that raised.

        Args:
            phase: name of the worker's method.
            args: its pickled arguments, from the replica.
        """
        try:
            getattr(self, phase)(*pickle.loads(args))
        except Exception as error:  # of any kind, see above
            kind = LOST if isinstance(error, ConnectionError) else FAILED
            return kind, str(error) or type(error).__name__
        return None

    def raylight_abort_update(self, started: bool) -> None:
        """Leave the transfer, and end an update that was broken off.

        Its layers have old, new and undefined weights until the next update is complete.

        Args:
            started: True if all workers have started the update; False if none or only some have.
        """
        self.weight_transfer_engine.shutdown()
        if started or self._weight_update_active:
            with set_current_vllm_config(self.vllm_config):
                self.weight_transfer_engine.finish_weight_update()
            self._weight_update_active = False


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Address and size of the sender's group; `rank_offset` is the rank of this engine's first worker."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Tensors of an update, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group_lens: list[int]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's side of a transfer. vLLM reloads a layer when it is complete."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._receiver = GlooReceiver()

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver.init(asdict(init_info), worker)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        try:
            with disable_mtp_completeness_check():
                for group in self._receiver.receive(asdict(update_info)):
                    self.model.load_weights(group)
        except BaseException:
            self._receiver.close()  # so that the sender does not wait for this worker
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._receiver.close()


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
