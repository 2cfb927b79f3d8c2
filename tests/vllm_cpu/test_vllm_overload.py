"""Many weight updates of vLLM with more requests than it has slots."""

import random
from typing import Any

import pytest
from overload import Load, load_version, uniform_weights
from vllm_helpers import within

from raylight.engines.capture_context import CURRENT, Sample

SLOTS, UPDATES = 8, 500

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900), pytest.mark.slow]


async def test_updates_under_overload_lose_no_request(small_bench: Any, model_path: str) -> None:
    """The phases pause, update and resume while requests run and three times as many wait."""
    bench, weights = small_bench, uniform_weights(model_path)
    async with within(360):

        async def send(prompt: list[int], length: int, luck: random.Random) -> Sample:
            await bench.openai.completions.create(
                model="policy", prompt=prompt, max_tokens=length, extra_body={"ignore_eos": True}
            )
            context = CURRENT.get()
            return context.samples[0]

        await load_version(bench.engine, 1, weights)
        load = Load(bench.engine, send, longest=60)
        await load.update(range(2, UPDATES + 2), weights, agents=4 * SLOTS, delay_s=0.05)
        assert bench.engine.version == UPDATES + 1
        assert load.most_waiting >= 2 * SLOTS
        assert load.ended >= UPDATES
        assert load.spanning >= UPDATES // 4
