"""The backend `gloo` of vLLM's weight transfer, which every worker process registers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from raylight.weights.gloo import GlooReceiver


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

    def __init__(self, *args: Any) -> None:
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
