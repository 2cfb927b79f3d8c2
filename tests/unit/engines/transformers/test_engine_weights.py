"""Weight updates of the transformers engine, and requests in flight during them."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers_helpers import (
    GREEDY,
    Brake,
    MakeEngine,
    check_greedy,
    generate_all,
    logprobs_of,
    other_weights,
)
from unit_helpers import within
from weight_loading import DictSource, begin_loading, load_weights

from raylight.engines.transformers.sampling import SamplingParams
from raylight.errors import WeightSyncError

LONG = SamplingParams(30, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="session")
def plain(tied_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()


@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
async def test_after_loading_the_engine_computes_with_the_new_weights(
    make_engine: MakeEngine, request: pytest.FixtureRequest, model: str
) -> None:
    path = request.getfixturevalue(model)
    weights, module = other_weights(path)
    engine = make_engine(path)
    await load_weights(engine, 3, weights)
    await check_greedy(engine, module, [1, 2, 3])
    (sampled,) = await generate_all(engine, [([1], GREEDY)])
    assert set(sampled.weight_versions) == {3}


async def test_a_tied_output_layer_need_not_be_sent(make_engine: MakeEngine, tied_model: str) -> None:
    weights, module = other_weights(tied_model)
    del weights["lm_head.weight"]
    engine = make_engine()
    await load_weights(engine, 1, weights)
    await check_greedy(engine, module, [4, 5, 6])


async def test_weights_loaded_in_flight_change_the_version_between_two_tokens(
    make_engine: MakeEngine, tied_model: str
) -> None:
    weights, module = other_weights(tied_model)
    engine = make_engine()
    brake = Brake(engine, at=10)
    async with within():
        running = [
            asyncio.create_task(engine.generate([i], SamplingParams(30, temperature=0.0)))
            for i in range(1, 9)
        ]
        await brake.reached.wait()
        loading = await begin_loading(engine, 1, weights)
        brake.release()
        await loading
        results = await asyncio.gather(*running)
    assert any(set(r.weight_versions) == {0, 1} for r in results)
    for result in results:
        assert result.weight_versions == sorted(result.weight_versions)
        assert len(result.weight_versions) == len(result.output_ids)
        assert result.weight_versions.count(0) <= 10
    await check_greedy(engine, module, [1, 2, 3])


def change(weights: dict[str, Any], how: str) -> dict[str, Any]:
    last = list(weights)[-2]  # so that others come before it
    if how == "missing":
        return {name: array for name, array in weights.items() if name != last}
    if how == "unknown":
        return {**weights, "model.nowhere.weight": weights[last]}
    return {**weights, last: weights[last][..., :-1]}


@pytest.mark.parametrize("how", ["missing", "unknown", "another shape"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    make_engine: MakeEngine, tied_model: str, plain: Any, how: str
) -> None:
    weights, _ = other_weights(tied_model)
    engine = make_engine()
    with pytest.raises(WeightSyncError):
        await load_weights(engine, 1, change(weights, how))
    assert engine.version == 0
    await check_greedy(engine, plain, [1, 2, 3])


async def test_under_keep_the_tokens_after_new_weights_are_those_of_the_new_weights_alone(
    make_engine: MakeEngine, tied_model: str, plain: Any
) -> None:
    weights, module = other_weights(tied_model)
    engine = make_engine()
    brake = Brake(engine, at=10)
    async with within():
        running = [asyncio.create_task(engine.generate([i, 2, 3], LONG)) for i in range(1, 5)]
        await brake.reached.wait()
        loading = await begin_loading(engine, 1, weights)
        brake.release()
        await loading
        results = await asyncio.gather(*running)
    for i, result in enumerate(results, 1):
        old = result.weight_versions.count(0)
        assert 0 < old < 30
        before = logprobs_of(plain, [i, 2, 3], result.output_ids)[:old]
        after = logprobs_of(module, [i, 2, 3], result.output_ids)[
            old:
        ]  # as if the whole past had been read with them
        assert result.logprobs == pytest.approx(before + after, abs=1e-4)


async def test_under_wait_requests_in_flight_end_first_and_later_ones_begin_with_the_new_weights(
    make_engine: MakeEngine, tied_model: str
) -> None:
    weights, _ = other_weights(tied_model)
    engine = make_engine(slots=2)
    brake = Brake(engine, at=5)
    async with within():
        running = [asyncio.create_task(engine.generate([i], LONG)) for i in range(1, 5)]
        await brake.reached.wait()
        loading = await begin_loading(engine, 1, weights, "wait")
        later = [asyncio.create_task(engine.generate([i], GREEDY)) for i in range(5, 8)]
        brake.release()
        await loading
        versions = [
            {v for r in await asyncio.gather(*calls) for v in r.weight_versions} for calls in (running, later)
        ]
        assert versions == [{0}, {1}]
        await load_weights(engine, 2, weights, "wait")
        assert engine.version == 2


async def test_under_abort_requests_in_flight_end_at_once(make_engine: MakeEngine, tied_model: str) -> None:
    weights, module = other_weights(tied_model)
    engine = make_engine(slots=2)
    brake = Brake(engine, at=5)
    async with within():
        running = [asyncio.create_task(engine.generate([i], LONG)) for i in range(1, 5)]
        await brake.reached.wait()
        loading = await begin_loading(engine, 1, weights, "abort")
        brake.release()
        await loading
        results = await asyncio.gather(*running)
    assert {r.finish_reason for r in results} == {"aborted"}
    assert sorted(len(r.output_ids) for r in results) == [0, 0, 5, 5]
    assert {version for r in results for version in r.weight_versions} == {0}
    await check_greedy(engine, module, [1, 2, 3])


async def test_an_update_that_nobody_waits_for_any_more_does_not_start(make_engine: MakeEngine) -> None:
    engine = make_engine()
    brake = Brake(engine, at=2)
    async with within():
        running = asyncio.create_task(engine.generate([1], LONG))
        await brake.reached.wait()
        starting = asyncio.create_task(engine.start_weight_update("wait"))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        brake.release()
        await running
        assert set((await engine.generate([1], GREEDY)).weight_versions) == {0}


async def test_weights_for_a_closed_engine_are_refused_instead_of_hanging(
    make_engine: MakeEngine, tied_model: str
) -> None:
    engine = make_engine()
    engine.close()
    async with within(20) as deadline:
        with pytest.raises(WeightSyncError):
            await load_weights(engine, 1, other_weights(tied_model)[0])
    assert not deadline.expired(), "it was refused only when the time was over"


async def test_an_update_that_was_broken_off_stays_incomplete_until_the_next_one(
    make_engine: MakeEngine, tied_model: str
) -> None:
    weights, module = other_weights(tied_model)
    engine = make_engine()

    async with within(30):
        for groups, is_incomplete in ((0, False), (2, True)):
            with pytest.raises(ConnectionError, match="connection to the other processes"):
                await load_weights(engine, 1, DictSource(weights, lost_after=groups))
            assert engine._worker.updating is is_incomplete
            sampling = asyncio.create_task(engine.generate([1], GREEDY))
            if not is_incomplete:
                assert set((await sampling).weight_versions) == {0}
        with pytest.raises(WeightSyncError, match="broken off; publish a new version"):
            await engine.logprobs([1, 2, 3])
        await load_weights(engine, 2, weights)
        assert set((await sampling).weight_versions) == {2}
    await check_greedy(engine, module, [1, 2, 3])
