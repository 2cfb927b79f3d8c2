"""An engine core that does not respond is noticed by its age, without waiting for it."""

import asyncio

import pytest
from coordinator_helpers import turns

from raylight.engines.vllm.core_watch import CoreWatch
from raylight.errors import WeightSyncError


class Core:
    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()
        self.error: Exception | None = None

    async def respond(self) -> bool:
        self.calls += 1
        await self.answers.wait()
        if self.error:
            raise self.error
        return False


async def test_a_core_that_responds_is_called_again() -> None:
    core = Core()
    core.answers.set()
    watch = CoreWatch(core.respond, 0.0)
    for _ in range(3):
        watch.check()
        await turns()
    assert core.calls == 3


async def test_a_core_that_does_not_respond_in_time_is_an_error() -> None:
    core = Core()
    watch = CoreWatch(core.respond, 0.0)
    watch.check()
    await turns()
    with pytest.raises(WeightSyncError, match="did not respond"):
        watch.check()
    patient = CoreWatch(core.respond, 60.0)
    patient.check()
    await turns()
    patient.check()
    assert core.calls == 2
    watch.reset()
    watch.check()  # counts from now on
    await turns()
    assert core.calls == 3
    for each in (watch, patient):
        each.reset()


async def test_an_error_of_the_core_is_raised() -> None:
    core = Core()
    core.error = RuntimeError("the core is dead")
    core.answers.set()
    watch = CoreWatch(core.respond)
    watch.check()
    await turns()
    with pytest.raises(RuntimeError, match="dead"):
        watch.check()
