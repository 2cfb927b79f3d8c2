"""Clients that sample: probes, and adapters on the engines."""

import asyncio
from typing import Any, cast

import pytest
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.errors import WeightSyncError

pytest.importorskip("tinker.proto", reason="pip install 'raylight[tinker]'")
from raylight.tinker.sampling import Samplers

PATH = "tinker://model/sampler_weights/a"


class Engines:
    """A stand-in for the coordinator of the engines. `gate` blocks its orders. If `late`, the next adapter is
    loaded after its time."""

    def __init__(self) -> None:
        self.adapters: set[str] = set()
        self.probing = 0
        self.gate = asyncio.Event()
        self.late = False

    async def pin(self, name: str, version: int, payload_ref: list[Any], timeout: float) -> None:
        await self.gate.wait()
        self.adapters.add(name)
        if self.late:
            self.late = False
            raise WeightSyncError("not in time")

    async def release(self, name: str, timeout: float) -> None:
        await self.gate.wait()
        self.adapters.discard(name)

    async def probe(self, ids: list[int], timeout: float, adapter: str | None) -> dict[str, list[float]]:
        self.probing += 1
        assert self.probing == 1, "an order waits behind more than one probe"
        assert adapter is None or adapter in self.adapters
        await asyncio.sleep(0)
        self.probing -= 1
        return {"replica": [-float(i) for i in ids[1:]]}


def samplers_of(engines: Engines, limit: int = 8) -> Samplers:
    async def fetch(path: str) -> Any:
        return [path]

    return Samplers("http://engines", "key", "base", cast(Any, engines), fetch, limit, timeout_s=5.0)


async def test_many_prompts_are_probed_one_after_another() -> None:
    samplers = samplers_of(Engines())
    async with within():
        probes = [samplers.prompt_logprobs(None, [1, 2, i]) for i in range(24)]
        assert await asyncio.gather(*probes) == [[None, -2.0, -i] for i in range(24)]


async def test_an_adapter_that_is_dropped_while_it_is_loaded_leaves_the_engines_with_its_last_user() -> None:
    engines = Engines()
    samplers = samplers_of(engines)
    async with within():
        probes = [asyncio.create_task(samplers.prompt_logprobs(PATH, [1, 2])) for _ in range(3)]
        await until(lambda: PATH in samplers._served)
        await samplers.drop(PATH)  # others have its name
        newer = asyncio.create_task(samplers.prompt_logprobs(PATH, [1, 2]))
        await until(lambda: PATH in samplers._served)
        engines.gate.set()
        assert await asyncio.gather(*probes, newer) == [[None, -2.0]] * 4
        assert engines.adapters == {samplers._served[PATH].name}
        await samplers.drop(PATH)
        assert engines.adapters == set()


async def test_an_adapter_whose_requests_were_cancelled_makes_room_once_it_is_loaded() -> None:
    engines = Engines()
    samplers = samplers_of(engines, limit=1)
    async with within():
        cancelled = asyncio.create_task(samplers.prompt_logprobs(PATH, [1, 2]))
        await until(lambda: PATH in samplers._served)
        await cancel_all([cancelled])
        other = asyncio.create_task(samplers.prompt_logprobs("other", [1, 2]))
        await until(lambda: "other" in samplers._served)
        engines.gate.set()
        assert await other == [None, -2.0]
        assert engines.adapters == {samplers._served["other"].name}


async def test_an_adapter_that_is_dropped_after_its_request_was_cancelled_leaves_the_engines() -> None:
    engines = Engines()
    samplers = samplers_of(engines)
    async with within():
        cancelled = asyncio.create_task(samplers.prompt_logprobs(PATH, [1, 2]))
        await until(lambda: PATH in samplers._served)
        await cancel_all([cancelled])
        dropping = asyncio.create_task(samplers.drop(PATH))
        await until(lambda: not samplers._served)
        engines.gate.set()
        await dropping
        assert engines.adapters == set()


async def test_an_adapter_that_engines_failed_to_load_in_time_is_released_before_it_is_loaded_again() -> None:
    engines = Engines()
    engines.gate.set()
    engines.late = True
    samplers = samplers_of(engines)
    async with within():
        with pytest.raises(WeightSyncError):
            await samplers.prompt_logprobs(PATH, [1, 2])
        assert engines.adapters == {"sampler-1"}
        assert await samplers.prompt_logprobs(PATH, [1, 2]) == [None, -2.0]
        assert engines.adapters == {"sampler-2"}


async def test_the_release_of_an_adapter_goes_on_if_its_caller_is_cancelled() -> None:
    engines = Engines()
    engines.gate.set()
    samplers = samplers_of(engines)
    async with within():
        await samplers.prompt_logprobs(PATH, [1, 2])
        engines.gate.clear()
        dropping = asyncio.create_task(samplers.drop(PATH))
        await until(lambda: not samplers._served)
        await cancel_all([dropping])
        engines.gate.set()
        await until(lambda: not engines.adapters)
