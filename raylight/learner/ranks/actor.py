"""One learner rank as a Ray actor: a thin shell around `Policy`."""

from __future__ import annotations

import ctypes
import datetime
import logging
import os
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import ray

from raylight.config import LearnerConfig, cpu_threads
from raylight.errors import WeightSyncError
from raylight.experience.settings.supervised_settings import SupervisedSettings
from raylight.learner.faults import classify_in_rank
from raylight.learner.progress import CLOCK, StackDump, dump_stacks
from raylight.learner.protocol import LearnerSettings
from raylight.learner.ranks.rendezvous import open_store, use_interface_of
from raylight.learner.state import shared_storage
from raylight.ray_metrics.reporter import Measurement, MetricReporter
from raylight.weights.sender import PublicationSettings

if TYPE_CHECKING:
    from raylight.experience.batches.shards import BatchShard
    from raylight.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)

WATCHDOG_GROUP = "watchdog"
"""Concurrency group with its own threads, for the methods that must answer while a call hangs."""
WATCHDOG_THREADS = 2
SENDING_GROUP = "sending"
"""Concurrency group with one thread, for sending a snapshot of the weights during other calls."""
PROCESS_GROUP_MARGIN_S = 30.0
"""Seconds for which a collective waits longer than the driver does, so that the driver notices a hang first
and can request stacks."""
KIBIBYTE = 1024
"""Unit of getrusage(2) on Linux."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt(3)."""


class LearnerActor:
    """A rank of the learner group. `LearnerGroup` calls its methods through `call`."""

    def __init__(self, rank: int, ranks: int, config: LearnerConfig, run: str = "") -> None:
        self._rank, self._ranks, self._config = rank, ranks, config
        limit = max(config.collective_timeout_s, config.start_timeout_s)
        self._timeout = datetime.timedelta(seconds=limit + PROCESS_GROUP_MARGIN_S)
        if not config.num_gpus:  # Ray hides no GPU from an actor without GPUs, but torch must not use one
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._store: Any = None
        self._policy: Any = None
        self._publisher: WeightPublisher | None = None
        self._model: Any = None
        self._update_s: float | None = None
        self._metrics = MetricReporter(self._measure, run, rank=str(rank))

    def _measure(self) -> list[Measurement]:
        name, host = "raylight_learner_memory_peak_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else KIBIBYTE
        measured = [Measurement(name, host * unit, {"memory": "host"})]
        if self._update_s is not None:
            measured.append(Measurement("raylight_learner_update_seconds", self._update_s))
            import torch

            if torch.cuda.is_available():
                device = torch.cuda.max_memory_allocated()
                measured.append(Measurement(name, device, {"memory": "device"}))
        return measured

    def call(self, method: str, limit_s: float, *args: object) -> object:
        """Call a method of this rank or its `ModelRank` under a watchdog; raise its failures as typed errors.

        Args:
            limit_s: seconds without progress after which the driver considers the call hung.

        Raises:
            LearnerMemoryError: the rank ran out of memory.
            LearnerLostError: the connection to the other ranks was lost.
        """
        CLOCK.start(method, limit_s)
        try:
            return getattr(self if hasattr(self, method) else self._model, method)(*args)
        except Exception as error:
            typed_error = classify_in_rank(error, self._rank, self._config)
            if typed_error is None:
                raise
            raise typed_error from error
        finally:
            CLOCK.stop(method)

    @ray.method(concurrency_group=WATCHDOG_GROUP)
    def dump_stacks(self, method: str) -> StackDump:
        """Dump the stacks of all threads, with a summary of the one that runs a method."""
        thread = CLOCK.thread_of(method)
        CLOCK.stop(method)
        return dump_stacks(thread)

    @ray.method(concurrency_group=WATCHDOG_GROUP)
    def idle_s(self, method: str) -> float:
        """Return the seconds since the call of a method last made progress."""
        return CLOCK.idle_s(method)

    @ray.method(concurrency_group=WATCHDOG_GROUP)
    def wait_forever(self) -> None:
        """Never return. The call fails when the actor ends, so that the driver can await the end."""
        threading.Event().wait()

    def open_rendezvous(self) -> tuple[str, int]:
        """Open the rendezvous of the ranks on a free port, and return its address. Called on rank 0."""
        address, self._store = open_store(self._ranks, self._timeout)
        return address

    def setup(
        self,
        address: tuple[str, int],
        model_path: str,
        settings: LearnerSettings,
        total_steps: int,
        seed: int,
    ) -> None:
        """Join the other ranks and build the model. A collective."""
        import torch
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available()
        use_interface_of(address[0], on_gpu)
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._ranks), LOCAL_RANK="0")
        torch.manual_seed(seed)
        torch.set_num_threads(cpu_threads(self._config))
        if not self._config.num_gpus:
            keep_freed_memory()
        from raylight.learner.ranks.model_rank import ModelRank
        from raylight.learner.updates.policy import Policy
        from raylight.learner.updates.policy_set import PolicySet
        from raylight.learner.updates.supervised import SupervisedModel

        if self._store is None:
            self._store = dist.TCPStore(*address, self._ranks, is_master=False, timeout=self._timeout)
        if self._config.num_gpus and not on_gpu:
            logger.warning(
                "learner.num_gpus=%g, but torch finds no GPU in rank %d, which computes on the CPU",
                self._config.num_gpus,
                self._rank,
            )
        # metrics are reduced on the CPU, even if the model is on a GPU
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(
            backend, store=self._store, rank=self._rank, world_size=self._ranks, timeout=self._timeout
        )
        if isinstance(settings, dict):
            self._policy = PolicySet(model_path, self._config, settings, total_steps)
        elif isinstance(settings, SupervisedSettings):
            self._policy = SupervisedModel(model_path, self._config, settings, total_steps)
        else:
            self._policy = Policy(model_path, self._config, settings, total_steps)
        self._model = ModelRank(self._policy)
        self._release_memory()
        self._metrics.start()

    def _release_memory(self) -> None:
        """Return unused memory of a GPU that an engine shares. Torch would keep the peak of an update."""
        if 0 < self._config.num_gpus < 1:
            import torch

            torch.cuda.empty_cache()

    def update(self, shards: list[ray.ObjectRef[BatchShard]]) -> dict[str, float]:
        """Update the policy with a batch; return metrics, equal on all ranks except for the time.

        Args:
            shards: object references of the batch's shards. This rank fetches its own only.
        """
        start = time.perf_counter()
        metrics = self._policy.update_shard(self._own(shards))
        self._release_memory()
        self._update_s = time.perf_counter() - start
        return metrics | {"learner/update_s": self._update_s}

    def evaluate(self, shards: list[ray.ObjectRef[BatchShard]]) -> dict[str, float]:
        """Return sums of a supervised model's figures over a batch, and their count, equal on all ranks.

        Args:
            shards: as for `update`.
        """
        totals = self._policy.evaluate_shard(self._own(shards))
        self._release_memory()
        return totals

    def _own(self, shards: list[ray.ObjectRef[BatchShard]]) -> BatchShard:
        return ray.get(shards[self._policy.engine.get_data_parallel_rank()])

    def take_snapshot(self, ids: list[int], settings: PublicationSettings) -> list[float]:
        """Copy this rank's shards of the weights, which `publish_weights` sends from then on; return their
        log-probs of `ids[1:]`. A collective."""
        self._open_publisher(settings).take_snapshot(self._policy.version)
        return self._model.logprobs(ids)

    def publish_weights(self, version: int, token: str, settings: PublicationSettings) -> None:
        """Send the weights to the engine replicas that lack them. A collective.

        Args:
            version: number of the weights.
            token: the publication's; empty for replicas that joined after it.
            settings: the same in every call.
        """
        publisher = self._open_publisher(settings)
        held = publisher.snapshot_version if settings.during_updates else self._policy.version
        if version != held:
            raise WeightSyncError(f"version {version} cannot be published: the learners hold version {held}")
        publisher.publish(version, token)

    def _open_publisher(self, settings: PublicationSettings) -> WeightPublisher:
        from raylight.weights.publisher import WeightPublisher

        if self._publisher is None:
            self._publisher = WeightPublisher(self._policy.engine.module, settings)
        return self._publisher

    def answer_driver(self, urls: list[str], token: str) -> dict[str, str]:
        """Write a token to folders that have the driver's; see `shared_storage`."""
        return shared_storage.answer(urls, token, self._rank)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the tensors of the next step; return True if it supports that.

    By default glibc maps every large tensor separately and returns it when freed, and the kernel clears the
    pages each time. For 20 million parameters on a CPU that takes a tenth of an update. The process then
    stays at its peak memory.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
