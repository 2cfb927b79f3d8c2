"""Weight updates in a live vLLM: tokens have the version that sampled them, and no old weights remain."""

import asyncio
from typing import Any

import pytest
import torch
from vllm_helpers import TOLERANCE, ask, change, difference, in_flight, until, within
from weight_loading import DictSource, load_weights

from raylight.errors import WeightSyncError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


async def test_only_the_new_weights_sample(bench: Any, learner: Any) -> None:
    version = next(bench.versions)
    await load_weights(bench.engine, version, change(learner, 1))
    await ask(bench, 24)
    assert set(bench.sample.weight_versions) == {version}
    assert difference(learner, bench.sample).max() < TOLERANCE
    assert difference(bench.reference(), bench.sample).max() > 0.1, "old and new weights are distinguishable"


async def test_the_tied_output_layer_must_be_sent(bench: Any, learner: Any) -> None:
    """Without `lm_head.weight`, vLLM on a CPU silently keeps the old output layer."""
    state = change(learner, 2)
    assert "lm_head.weight" in state
    part = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    await load_weights(bench.engine, next(bench.versions), part)
    await ask(bench, 24)
    assert difference(learner, bench.sample).max() > 0.1, (
        "vLLM no longer needs lm_head.weight: this test has become superfluous"
    )
    await load_weights(bench.engine, next(bench.versions), state)
    await ask(bench, 24)
    assert difference(learner, bench.sample).max() < TOLERANCE


async def test_weights_can_be_numpy_arrays(bench: Any, learner: Any) -> None:
    await load_weights(
        bench.engine, next(bench.versions), {name: t.numpy() for name, t in change(learner, 3).items()}
    )
    await ask(bench, 8)
    assert difference(learner, bench.sample).max() < TOLERANCE


@pytest.mark.parametrize("stream", [False, True])
async def test_keep_lets_requests_in_flight_continue_with_the_new_weights(
    bench: Any, learner: Any, stream: bool
) -> None:
    old, new = bench.engine.version, next(bench.versions)
    tasks, contexts = await in_flight(bench, 8, 300, stream=stream)
    await load_weights(bench.engine, new, change(learner, 4))
    async with within():
        for answer in await asyncio.gather(*tasks):
            if stream:
                assert [chunk async for chunk in answer]
    reference = bench.reference()
    boundaries = set()
    for context in contexts:
        sample = context.samples[0]
        boundary = sample.weight_versions.count(old)
        boundaries.add(boundary)
        assert len(sample.output_ids) == 300
        assert sample.weight_versions == [old] * boundary + [new] * (300 - boundary)
        assert 3 < boundary < 300
        by_old, by_new = difference(reference, sample), difference(learner, sample)
        assert by_old[:boundary].max() < TOLERANCE
        assert by_new[boundary:].max() < TOLERANCE, "the cache of the old weights was used"
        assert by_new[boundary - 1] > TOLERANCE
        assert by_old[boundary] > TOLERANCE


async def test_the_weights_wait_for_requests_in_flight(bench: Any, learner: Any) -> None:
    old, new = bench.engine.version, next(bench.versions)
    tasks, contexts = await in_flight(bench, 4, 200)
    await load_weights(bench.engine, new, change(learner, 5), "wait")
    await asyncio.gather(*tasks)
    assert [set(e.samples[0].weight_versions) for e in contexts] == [{old}] * 4
    assert {len(e.samples[0].output_ids) for e in contexts} == {200}
    await ask(bench, 4)
    assert set(bench.sample.weight_versions) == {new}


async def test_the_load_shows_requests_cache_and_pauses(bench: Any, learner: Any) -> None:
    engine, loads = bench.engine, []
    before = engine.load()
    assert (before.running, before.waiting, before.kv_use) == (0, 0, 0)
    assert before.capacity > 1000
    tasks, _ = await in_flight(bench, 4, 200)
    await until(lambda: engine.load().running == 4)
    assert 0 < engine.load().kv_use < 1
    update = engine.update_weights

    async def read_load(info: Any) -> None:
        loads.append(engine.load())
        await update(info)

    engine.update_weights = read_load
    try:
        await load_weights(engine, next(bench.versions), change(learner, 9))
    finally:
        del engine.update_weights
    assert loads[0].paused
    assert not engine.load().paused
    await asyncio.gather(*tasks)
    assert (engine.load().running, engine.load().preemptions) == (0, 0)


async def test_requests_in_flight_are_aborted(bench: Any, learner: Any) -> None:
    old, new = bench.engine.version, next(bench.versions)
    tasks, contexts = await in_flight(bench, 4, 400)
    await load_weights(bench.engine, new, change(learner, 6), "abort")
    async with within():
        answers = await asyncio.gather(*tasks)
    assert [a.choices[0].finish_reason for a in answers] == ["abort"] * 4
    for context in contexts:
        sample = context.samples[0]
        assert (sample.finish_reason, set(sample.weight_versions)) == ("aborted", {old})
        assert 3 < len(sample.output_ids) < 400


async def test_a_request_during_an_update_gets_the_new_weights(
    bench: Any, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, state = next(bench.versions), change(learner, 7)
    update, tasks = bench.engine.update_weights, []

    async def update_with_a_request_before(info: Any) -> None:
        tasks.append(ask(bench, 8))
        await until(lambda: len(bench.engine._client.output_processor.request_states) == 1)
        await update(info)

    monkeypatch.setattr(bench.engine, "update_weights", update_with_a_request_before)
    await load_weights(bench.engine, new, state)
    await asyncio.gather(*tasks)
    assert bench.sample.weight_versions == [new] * 8
    assert difference(learner, bench.sample).max() < TOLERANCE


@pytest.mark.parametrize("lost_after", [0, 2])
async def test_an_update_that_was_broken_off_is_repaired_by_the_next_one(
    bench: Any, learner: Any, lost_after: int
) -> None:
    old, state = bench.engine.version, change(learner, 9)
    with pytest.raises(ConnectionError, match="connection to the other processes"):
        await load_weights(bench.engine, old + 100, DictSource(state, lost_after=lost_after))
    waiting = ask(bench, 8)
    with pytest.raises(WeightSyncError, match="broken off; publish a new version"):
        await bench.engine.logprobs([1, 2, 3])
    new = next(bench.versions)
    await load_weights(bench.engine, new, state)
    await waiting
    assert set(bench.sample.weight_versions) == {new}
    assert difference(learner, bench.sample).max() < TOLERANCE
    await bench.engine.check_health()


async def test_a_version_without_weights_keeps_those_before(bench: Any, learner: Any) -> None:
    """A simulated learner publishes such versions."""
    await load_weights(bench.engine, next(bench.versions), change(learner, 12))
    old, new = bench.engine.version, next(bench.versions)
    tasks, contexts = await in_flight(bench, 2, 200)
    await bench.engine.start_weight_update()
    await bench.engine.finish_weight_update(new)
    await asyncio.gather(*tasks)
    for context in contexts:
        assert set(context.samples[0].weight_versions) == {old, new}
        assert difference(learner, context.samples[0]).max() < TOLERANCE


async def test_a_tensor_of_another_shape_is_an_error(bench: Any, learner: Any) -> None:
    state = change(learner, 11)
    with pytest.raises(WeightSyncError):
        await load_weights(
            bench.engine, bench.engine.version + 100, state | {"model.norm.weight": torch.zeros(3)}
        )
    await load_weights(bench.engine, next(bench.versions), state)
    await ask(bench, 8)
    assert difference(learner, bench.sample).max() < TOLERANCE


async def test_a_cancelled_wait_resumes_the_engine(bench: Any, learner: Any) -> None:
    version = bench.engine.version
    tasks, contexts = await in_flight(bench, 2, 400)
    waiting = asyncio.create_task(bench.engine.start_weight_update("wait"))
    await asyncio.sleep(0)
    await until(lambda: bench.engine._paused)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with within():
        await asyncio.gather(*tasks, ask(bench, 4))
    assert {v for e in contexts for v in e.samples[0].weight_versions} == {version}
