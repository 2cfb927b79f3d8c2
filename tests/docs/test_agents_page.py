"""The blocks of the page on agents that use a store or an algorithm run with a store in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from docs_snippets import DOCS, snippet

import raylight as rl
from raylight.semconv import ANNOTATION, reward_attributes

PAGE = DOCS / "agents.md"


async def run_agent(store: rl.StoreClient) -> None:
    """Process rollouts as a runner whose agent's reward is its task."""
    while True:
        rollout = await store.dequeue_rollout("runner", timeout=60.0)
        reward = rl.Span.from_attributes(
            name=ANNOTATION,
            attributes=dict(reward_attributes({"primary": float(rollout.input)})),
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
        )
        await store.finish_attempt(rollout, "succeeded", None, [reward])


@contextlib.asynccontextmanager
async def runner(store: rl.StoreClient) -> AsyncIterator[None]:
    running = asyncio.create_task(run_agent(store))
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_algorithm_as_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    algorithm, store = (
        snippet(PAGE, "algorithm").run({"rl": rl})["Evaluate"](),
        rl.StoreClient(rl.StoreService()),
    )
    algorithm.set_store(store)
    async with runner(store):
        await algorithm.run(val_dataset=[1, 2, 6])
    assert capsys.readouterr().out == "3.0\n"


async def test_the_algorithm_as_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    algorithm, store = (
        snippet(PAGE, "algo").run({"rl": rl})["best_of_two"],
        rl.StoreClient(rl.StoreService()),
    )
    algorithm.set_store(store)
    async with runner(store):
        await algorithm.run([1, 2])
    assert capsys.readouterr().out == "1 1.0\n2 2.0\n"
    assert len(await store.query_rollouts()) == 4
    with pytest.raises(TypeError, match="val_dataset"):
        algorithm.run([1], [2])


def test_a_store_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> None:
        service = rl.StoreService("outputs/quickstart/store.db")
        store = rl.StoreClient(service)
        async with runner(store):
            queued = await store.enqueue_rollout(5)
            await store.wait_until_decided(rollout_ids=[queued.rollout_id])
        await service.close()

    monkeypatch.chdir(tmp_path)
    Path("outputs/quickstart").mkdir(parents=True)
    asyncio.run(fill())
    snippet(PAGE, "store").run()
    assert capsys.readouterr().out == "5 5.0\n[]\n[]\n"


def test_a_block_that_is_traced_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    snippet(PAGE, "block").run()
    assert capsys.readouterr().out == f"['{ANNOTATION}', 'step']\n"


def test_a_step_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    snippet(PAGE, "step").run()
    assert capsys.readouterr().out.splitlines()[-1] == "6.0"
