"""Many weight updates of the transformers engine with more requests than it has slots."""

import random

import pytest
from overload import Load, load_version, uniform_weights
from transformers_helpers import MakeEngine, client_of, open_context
from unit_helpers import within

from raylight.engines.capture_context import Sample
from raylight.engines.transformers.sampling import SamplingParams

SLOTS = 4


@pytest.mark.parametrize("updates", [15, pytest.param(500, marks=pytest.mark.slow)])
async def test_updates_under_overload_lose_no_request(
    updates: int, make_engine: MakeEngine, untied_model: str
) -> None:
    engine = make_engine(untied_model, slots=SLOTS, max_waiting=3 * SLOTS)
    client, weights = await client_of(engine), uniform_weights(untied_model)

    async def send(prompt: list[int], length: int, luck: random.Random) -> Sample:
        context = open_context()
        if luck.random() < 0.7:
            await engine.generate(prompt, SamplingParams(length, ignore_eos=True))
        else:
            await client.completions.create(
                model="policy", prompt=prompt, max_tokens=length, extra_body={"ignore_eos": True}
            )
        return context.samples[0]

    async with within(240):
        await load_version(engine, 1, weights)
        load = Load(engine, send, longest=60)
        await load.update(range(2, updates + 2), weights, agents=4 * SLOTS, delay_s=0.02)
    assert engine.version == updates + 1
    assert load.most_waiting >= 2 * SLOTS
    assert load.spanning >= updates // 4
