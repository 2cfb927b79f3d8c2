"""One learner rank as a Ray actor: a thin shell around Policy."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import ray

from raylight.config import LearnerConfig
from raylight.learner.batch import TrainBatch
from raylight.learner.settings import PolicySettings

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


class LearnerActor:
    """A rank of the learner group."""

    def __init__(self, rank: int, ranks: int, config: LearnerConfig) -> None:
        self._rank, self._ranks, self._config = rank, ranks, config
        if not config.num_gpus:  # Ray hides no GPU from an actor that asks for none; torch must not find one
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._store: Any = None
        self._policy: Any = None

    def open_rendezvous(self) -> tuple[str, int]:
        """On rank 0: open the meeting point of the ranks on a free port; returns its address."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, self._ranks, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
        return host, self._store.port

    def setup(
        self,
        address: tuple[str, int],
        model_path: str,
        settings: PolicySettings,
        total_steps: int,
        seed: int,
    ) -> None:
        """Join the other ranks and build the model. All ranks call this at the same time."""
        import torch
        import torch.distributed as dist

        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._ranks), LOCAL_RANK="0")
        torch.manual_seed(seed)
        torch.set_num_threads(max(1, int(self._config.num_cpus)))
        from raylight.learner.policy import Policy

        if self._store is None:
            self._store = dist.TCPStore(*address, self._ranks, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        # the metrics are reduced on the CPU, also where the model is on a GPU
        backend = "cpu:gloo,cuda:nccl" if self._config.num_gpus else "gloo"
        dist.init_process_group(
            backend, store=self._store, rank=self._rank, world_size=self._ranks, timeout=COLLECTIVE_TIMEOUT
        )  # fmt: skip
        self._policy = Policy(model_path, self._config, settings, total_steps)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update; the metrics are the same on every rank."""
        start = time.perf_counter()
        metrics = self._policy.update(batch)
        return metrics | {"learner/update_s": time.perf_counter() - start}

    def logprobs(self, ids: list[int]) -> list[float] | None:
        """On rank 0: the policy's log-probs of `ids[1:]`; None elsewhere, though every rank computes."""
        logprobs = self._policy.logprobs(ids)
        return logprobs if self._rank == 0 else None

    def export(self) -> tuple[int, list[Any]] | None:
        """On rank 0: the version and a box with the reference to its weights in the object store; None elsewhere."""
        arrays = self._policy.export()
        return (self._policy.version, [ray.put(arrays)]) if arrays is not None else None

    def save(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        self._policy.save(folder)
