"""Weights reach two replicas of vLLM, each with one worker or with two."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_helpers import run_program

IPC_ARGS = (torch.Tensor, torch.Size([4]), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"handle", 16, 0)
"""Handle of GPU memory, as torch's `reduce_tensor` returns it."""


async def test_handles_of_gpu_memory_reach_the_workers() -> None:
    """vLLM's messages to its engine core contain plain values and bytes only."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from raylight.engines.vllm.engine import VllmEngine
    from raylight.engines.vllm.transfer_worker import TransferWorkerExtension

    received: list[Any] = []

    class Worker(TransferWorkerExtension):
        def update_weights(self, info: Any) -> None:
            received.append(info)

    async def collective_rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        message = MsgpackDecoder().decode(MsgpackEncoder().encode((method, args)))
        return [getattr(Worker(), message[0])(*message[1])]

    info = {"names": ["weight"], "ipc_handles": {"GPU-1": IPC_ARGS}}
    engine: Any = SimpleNamespace(_client=SimpleNamespace(collective_rpc=collective_rpc))
    await VllmEngine._transfer(engine, "update_weights", info)
    assert received == [info]


def test_an_abort_ends_the_update_of_a_worker_that_alone_has_started() -> None:
    from raylight.engines.vllm.transfer_worker import TransferWorkerExtension

    calls: list[str] = []
    worker: Any = TransferWorkerExtension()
    worker.weight_transfer_engine = SimpleNamespace(
        shutdown=lambda: calls.append("shutdown"), finish_weight_update=lambda: calls.append("finish")
    )
    worker.vllm_config, worker._weight_update_active = _some_config(), True
    worker.raylight_abort_update(False)
    assert calls == ["shutdown", "finish"]
    assert not worker._weight_update_active


def _some_config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_replicas_receive_three_versions(tmp_path: Path, tensor_parallel_size: int) -> None:
    done = run_program("transferred_weights.py", tmp_path, tensor_parallel_size, timeout_s=580)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert max(found["after"]) < 1e-4
    assert min(found["before"]) > 0.01
