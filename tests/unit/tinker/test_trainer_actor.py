"""The trainer's client: an unreachable trainer is asked again, and a dead one is dead."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError
from unit_helpers import within

from raylight._utils.aio import cancel_all
from raylight.errors import AdapterLostError, LearnerLostError
from raylight.tinker import trainer_actor
from raylight.tinker.models import RESTARTED, AdapterTrainer
from raylight.tinker.requests import AdamParams, LoraSpec
from raylight.tinker.trainer_actor import NumberedCalls, TrainerClient

UNREACHABLE = ActorUnavailableError("connection reset", None)


class Adapters:
    """Adapters of a process, with the number of steps that each has taken."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def create(self, model_id: str, spec: LoraSpec) -> None:
        self.steps[model_id] = 0

    def remove(self, model_id: str) -> None:
        self.steps.pop(model_id, None)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        if model_id not in self.steps:
            raise AdapterLostError(RESTARTED)
        self.steps[model_id] += 1
        return {"steps": self.steps[model_id]}


class Handle:
    """A stand-in for the actor's handle. `faults` are the errors of the next calls, each before or after the
    trainer has executed it."""

    def __init__(self) -> None:
        self.faults: list[tuple[bool, Exception]] = []
        self.dead = False
        self.ended = asyncio.Event()
        self._ids = itertools.count()
        self.restart()

    def restart(self) -> None:
        self.adapters = Adapters()
        self._calls = NumberedCalls(self.adapters)
        self._id = str(next(self._ids))
        self.interrupt()

    def interrupt(self) -> None:
        self.ended.set()
        self.ended = asyncio.Event()

    def die(self) -> None:
        self.dead = True
        self.ended.set()

    @property
    def call(self) -> Any:
        async def remote(*args: Any) -> Any:
            if not self.faults:
                return self._calls.call(*args)
            executed, error = self.faults.pop(0)
            if isinstance(error, OutOfMemoryError):
                self.restart()
            elif executed:
                self._calls.call(*args)
            raise error

        return method(remote)

    @property
    def ready(self) -> Any:
        async def remote() -> str:
            if self.dead:
                raise ActorDiedError()
            return self._id

        return method(remote)

    @property
    def wait_forever(self) -> Any:
        async def remote() -> None:
            await self.ended.wait()
            raise ActorDiedError() if self.dead else UNREACHABLE

        return method(remote)


def method(remote: Callable[..., Awaitable[Any]]) -> Any:
    return SimpleNamespace(remote=remote, options=lambda **options: SimpleNamespace(remote=remote))


@pytest.fixture
async def handle(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Handle]:
    monkeypatch.setattr(trainer_actor, "RETRY_DELAY_S", 0.001)
    async with within():
        yield Handle()


async def client_of(handle: Handle, timeout_s: float = 5.0) -> TrainerClient:
    client = TrainerClient(handle, timeout_s)
    await client.wait_ready()
    await client.call(AdapterTrainer.create, "a", LoraSpec(rank=2))
    return client


@pytest.mark.parametrize("executed", [False, True])
async def test_a_call_that_did_not_reach_the_trainer_is_executed_once(handle: Handle, executed: bool) -> None:
    client = await client_of(handle)
    for number in (1, 2):
        handle.faults = [(executed, UNREACHABLE)] * 3
        assert await client.call(AdapterTrainer.optim_step, "a", AdamParams()) == {"steps": number}
    assert handle.adapters.steps == {"a": 2}


async def test_a_trainer_that_stays_unreachable_is_lost(handle: Handle) -> None:
    client = await client_of(handle, timeout_s=0.05)
    handle.faults = [(False, UNREACHABLE)] * 1000
    with pytest.raises(LearnerLostError, match=r"could not be reached again within 0\.05 s"):
        await client.call(AdapterTrainer.optim_step, "a", AdamParams())


async def test_a_trainer_that_died_for_good_is_lost(handle: Handle) -> None:
    client = await client_of(handle)
    handle.faults = [(False, ActorDiedError())]
    handle.die()
    for call in (client.call(AdapterTrainer.optim_step, "a", AdamParams()), client.wait_loss()):
        with pytest.raises(LearnerLostError, match="start the server again"):
            await call


async def test_a_restarted_trainer_has_lost_its_adapters(handle: Handle) -> None:
    client = await client_of(handle)
    handle.faults = [(False, OutOfMemoryError("killed"))]
    with pytest.raises(AdapterLostError, match="died and was started again"):
        await client.call(AdapterTrainer.optim_step, "a", AdamParams())
    assert await client.wait_loss() == ["a"]
    await client.call(AdapterTrainer.create, "b", LoraSpec(rank=2))
    assert await client.call(AdapterTrainer.optim_step, "b", AdamParams()) == {"steps": 1}


async def test_the_loss_of_idle_adapters_is_noticed(handle: Handle) -> None:
    client = await client_of(handle)
    await client.call(AdapterTrainer.create, "b", LoraSpec(rank=2))
    await client.call(AdapterTrainer.create, "removed", LoraSpec(rank=2))
    await client.call(AdapterTrainer.remove, "removed")
    waiting = asyncio.create_task(client.wait_loss())
    await asyncio.sleep(0)
    handle.interrupt()  # unreachable for a moment
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    handle.restart()
    assert await waiting == ["a", "b"]
    await client.call(AdapterTrainer.create, "c", LoraSpec(rank=2))
    again = asyncio.create_task(client.wait_loss())
    await asyncio.wait([again], timeout=0.01)
    assert not again.done()
    await cancel_all([again])
