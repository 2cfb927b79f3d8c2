"""One learner rank as a Ray actor: a thin shell around Policy."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from raylight.config import LearnerConfig, cpu_threads
from raylight.errors import LearnerError
from raylight.experience.batch import TrainBatch
from raylight.experience.checkpoints import BackgroundWriter, TrainingStates
from raylight.experience.settings import PolicySettings
from raylight.learner.faults import fault_in_rank
from raylight.learner.malloc import keep_freed_memory
from raylight.learner.stack_dump import Stacks, take_stacks

WATCH = "watch"
"""Concurrency group of the methods that answer while a call hangs; it has threads of its own."""
WATCH_THREADS = 2
DUMP_LATE_S = 3.0
"""How long after its deadline a call's stacks go to the actor's log, where nobody has asked for them: it holds the interpreter."""
STDERR = 2


class LearnerActor:
    """A rank of the learner group. Calls go through `call`."""

    def __init__(self, rank: int, ranks: int, config: LearnerConfig) -> None:
        self._rank, self._ranks, self._config = rank, ranks, config
        # past the deadline of any call, so that the driver sees a hang first, and can ask for stacks
        self._timeout = datetime.timedelta(seconds=max(config.collective_timeout_s, config.start_timeout_s))
        self._busy: int | None = None
        if not config.num_gpus:  # Ray hides no GPU from an actor that asks for none; torch must not find one
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._store: Any = None
        self._policy: Any = None
        self._writer = BackgroundWriter()

    def call(self, method: str, limit_s: float, *args: Any) -> Any:
        """Call a method that ought to be over within `limit_s` seconds.

        Raises:
            LearnerMemoryError: there was not enough memory for it.
            LearnerLostError: the other ranks were lost meanwhile.
        """
        with self._watched(limit_s):
            return getattr(self, method)(*args)

    @contextlib.contextmanager
    def _watched(self, limit_s: float) -> Iterator[None]:
        self._busy = threading.get_ident()
        faulthandler.dump_traceback_later(limit_s + DUMP_LATE_S, file=STDERR)
        try:
            yield
        except Exception as error:
            fault = fault_in_rank(error, self._rank, self._config)
            if fault is None:
                raise
            raise fault from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._busy = None

    @ray.method(concurrency_group=WATCH)
    def stacks(self) -> Stacks:
        """What all threads are at, and first of all the one that `call` runs on."""
        faulthandler.cancel_dump_traceback_later()
        return take_stacks(self._busy)

    @ray.method(concurrency_group=WATCH)
    def linger(self) -> None:
        """Never answers; who waits for it hears of the actor's end."""
        threading.Event().wait()

    def open_rendezvous(self) -> tuple[str, int]:
        """On rank 0: open the meeting point of the ranks on a free port; returns its address."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(
            host, 0, self._ranks, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
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

        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(ray.util.get_node_ip_address()))
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._ranks), LOCAL_RANK="0")
        torch.manual_seed(seed)
        torch.set_num_threads(cpu_threads(self._config))
        if not self._config.num_gpus:
            keep_freed_memory()
        from raylight.learner.policy import Policy

        if self._store is None:
            self._store = dist.TCPStore(*address, self._ranks, is_master=False, timeout=self._timeout)
        # the metrics are reduced on the CPU, also where the model is on a GPU
        backend = "cpu:gloo,cuda:nccl" if self._config.num_gpus else "gloo"
        dist.init_process_group(
            backend, store=self._store, rank=self._rank, world_size=self._ranks, timeout=self._timeout
        )
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

    def save_state(self, url: str, step: int, about: dict[str, Any], keep: int) -> None:
        """Gather the training state; rank 0 writes it in the background, once the one before it is written."""
        import torch

        from raylight.learner import state

        self._writer.wait()
        content = state.gather(self._policy)
        if content is not None:
            states = TrainingStates(url)

            def write() -> None:
                states.write(step, about, lambda file: torch.save(content, file))
                states.prune(keep)

            self._writer.start(write)

    def finish_saving(self) -> None:
        """Wait until the last state is written."""
        self._writer.wait()

    def load_state(self, url: str, step: int, version: int) -> None:
        """Continue from the state of a step; step 0 is the model's own files. Its weights are called `version` from now on."""
        from raylight.learner import state

        if step:
            with TrainingStates(url).open(step) if self._rank == 0 else contextlib.nullcontext() as file:
                state.load(self._policy, file)
        self._policy.version = version


def interface_of(address: str) -> str:
    """The network interface that has this address. gloo itself takes the one that the host's name points to, which may be the
    loopback that no other node reaches.

    Raises:
        LearnerError: none has it.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(known.address == address for known in addresses):
            return name
    raise LearnerError(
        f"no network interface of this node has its address {address} in the cluster; set GLOO_SOCKET_IFNAME to the one that the "
        f"learners meet on, of {', '.join(interfaces)}"
    )
