"""New weights wait until every token of the old weights is recorded. A stub replaces vLLM's client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm_helpers import within

if TYPE_CHECKING:
    from raylight.engines.vllm.capture import Capture


class Core:
    """Stub of the client that connects vLLM to its engine core."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()

    async def get_output_async(self) -> Any:
        output = await self.outputs_queue.get()
        if isinstance(output, Exception):
            raise output
        return output


def make_capture() -> tuple[Core, Capture]:
    from raylight.engines.vllm.capture import Capture

    core = Core()
    processor = SimpleNamespace(request_states={}, add_request=None)
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
    )
    client = SimpleNamespace(output_processor=processor, engine_core=core, vllm_config=config)
    return core, Capture(client)


async def handle(core: Core, done: list[Any], turns: int = 3) -> None:
    """Process outputs as vLLM does, slowly."""
    while True:
        output = await core.get_output_async()
        for _ in range(turns):
            await asyncio.sleep(0)
        done.append(output)


async def test_waiting_ends_when_all_outputs_are_processed() -> None:
    core, capture = make_capture()
    done: list[Any] = []
    handler = asyncio.create_task(handle(core, done))
    async with within():
        await capture.wait_until_recorded()  # there was no output yet
        for count in (1, 3):
            for _ in range(count):
                core.outputs_queue.put_nowait("output")
            before = len(done)
            await capture.wait_until_recorded()
            assert len(done) == before + count
        core.outputs_queue.put_nowait("output")
        await asyncio.sleep(0)
        assert core.outputs_queue.empty()  # fetched, but not yet processed
        await capture.wait_until_recorded()
        assert len(done) == 5
    handler.cancel()


async def test_waiting_ends_if_vllm_died() -> None:
    core, capture = make_capture()
    handler = asyncio.create_task(handle(core, []))
    core.outputs_queue.put_nowait(RuntimeError("dead"))
    core.outputs_queue.put_nowait("never taken")
    async with within():
        await capture.wait_until_recorded()
        await capture.wait_until_recorded()
        with pytest.raises(RuntimeError, match="dead"):
            await handler
