"""The weight coordinator is killed, and replicas are frozen: orders still reach every replica that serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.state import list_actors
from ray_cluster import Cluster
from served_replicas import NAME, Served, publish_weights, replica_pid, serve_joined, served

from raylight.quickstart import STARTER_MODEL
from raylight.weights.actor import COORDINATOR_NAME

DEADLINE_S = 240
IDS = [5, 9, 12, 7, 20, 31]


@pytest.fixture
def connected(cluster: Cluster) -> Any:
    with ray.init(address=cluster.address, log_to_driver=False):
        yield
    cluster.assert_clean()


class Model:
    """The starter model with changed weights, and their log-probs as plain transformers computes them."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
        self.version = 0

    def change(self) -> dict[str, Any]:
        """Change the weights; return a copy of them."""
        self.version += 1
        with self._torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.02)
        return self.weights()

    def weights(self) -> dict[str, Any]:
        return {name: t.clone() for name, t in self._model.state_dict().items()}

    def logprobs(self) -> list[float]:
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([IDS])).logits[0, :-1].float()
        chosen = torch.tensor(IDS[1:])[:, None]
        return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].tolist()


async def assert_parity(model: Served, reference: Model, replicas: int) -> set[str]:
    """Probe all replicas; return their names."""
    probed = await model.coordinator.probe(IDS, 60.0)
    assert len(probed) == replicas
    for logprobs in probed.values():
        assert logprobs == pytest.approx(reference.logprobs(), abs=1e-3)
    return set(probed)


async def publish(model: Served, reference: Model, timeout: float = 60.0) -> int:
    """Publish new weights; return the number of replicas that have them."""
    began = time.monotonic()
    count = await publish_weights(model, reference.version + 1, reference.change(), timeout)
    print(f"version {reference.version} published to {count} in {time.monotonic() - began:.1f} s")
    return count


def coordinator_pid() -> int:
    (found,) = list_actors(
        filters=[("state", "=", "ALIVE"), ("name", "=", COORDINATOR_NAME), ("ray_namespace", "=", NAME)],
        detail=True,
    )
    return found.pid


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process; let it go on at the end if it still exists."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_a_killed_coordinator_continues_with_its_orders(tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), served(tmp_path, num_cpus=0) as model:
        reference = Model()
        assert await publish(model, reference) == 1
        os.kill(coordinator_pid(), signal.SIGKILL)  # between two orders
        assert await publish(model, reference) == 1
        (replica,) = await assert_parity(model, reference, 1)
        with frozen(replica_pid(replica)):  # during an order
            publishing = asyncio.create_task(publish(model, reference))
            await asyncio.wait([publishing], timeout=0.5)
            assert not publishing.done()
            os.kill(coordinator_pid(), signal.SIGKILL)
        assert await publishing == 1
        assert await assert_parity(model, reference, 1) == {replica}
        assert model.coordinator.restarts == 2
        assert model.coordinator.evictions == 0


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_frozen_replicas_are_replaced_within_an_order(tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), served(tmp_path, replicas=2, num_cpus=0) as model:
        reference = Model()
        assert await publish(model, reference) == 2
        first, second = sorted(await assert_parity(model, reference, 2))
        os.kill(replica_pid(first), signal.SIGSTOP)  # one of two: the order completes without it
        assert await publish(model, reference, timeout=40) == 1
        await serve_joined(model, reference.version, reference.weights(), 2)
        replicas = await assert_parity(model, reference, 2)
        assert (first in replicas, second in replicas) == (False, True)

        for replica in replicas:  # all: the order waits for the replacements
            os.kill(replica_pid(replica), signal.SIGSTOP)
        assert await publish(model, reference, timeout=40) >= 1
        await serve_joined(model, reference.version, reference.weights(), 2)
        assert not replicas & await assert_parity(model, reference, 2)
        assert model.coordinator.evictions == 3
        assert model.coordinator.restarts == 0
