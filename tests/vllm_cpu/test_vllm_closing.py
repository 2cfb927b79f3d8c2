"""The shared engine after a failed load. These tests run last (see conftest.py)."""

import asyncio
from typing import Any

import pytest
from openai import APIStatusError
from vllm_helpers import DEADLINE_S, ask, in_flight, within
from weight_loading import load_weights

from raylight.errors import WeightSyncError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(DEADLINE_S)]


async def test_a_possibly_half_loaded_engine_stops_sampling(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, contexts = await in_flight(bench, 2, 400)

    async def fail(*args: Any, **named: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench.engine._client, "collective_rpc", fail)
    async with within():
        with pytest.raises(WeightSyncError, match="must be restarted: out of memory"):
            await load_weights(bench.engine, next(bench.versions), bench.reference().state_dict())
        answers = await asyncio.gather(*tasks, ask(bench, 4), return_exceptions=True)
    assert [answer.status_code for answer in answers if isinstance(answer, APIStatusError)] == [503] * 3
    assert {context.samples[0].finish_reason for context in contexts} == {"aborted"}
    with pytest.raises(WeightSyncError, match="must be restarted"):
        await bench.engine.check_health()
    with pytest.raises(WeightSyncError, match="must be restarted"):
        await load_weights(bench.engine, next(bench.versions), {})
    bench.engine.close()
