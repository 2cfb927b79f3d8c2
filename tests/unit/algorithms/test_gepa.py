"""GEPA around the package: rollouts through a store in this process, rejected prompts, and cancellation."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_models import add_a_missing_word, serve_script
from store_helpers import BROKEN, reward_of, span_of
from unit_helpers import within

import raylight as rl
from raylight.algorithms.apo.trials import Trial, trial_record
from raylight.algorithms.gepa import RolloutAdapter
from raylight.errors import CheckpointError, ConfigError, CriticError, DatasetError, RolloutsFailedError
from raylight.semconv import MESSAGE, MESSAGE_BODY
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import Failure

pytest.importorskip("gepa")
SEED = rl.PromptTemplate(template="Add {a}.")
LOST = Failure(kind="infrastructure", error="ConnectionError: gone")


@contextlib.asynccontextmanager
async def agents(
    store: StoreClient, failure: Failure | None = None, rewards: Callable[[str], Any] | None = None
) -> AsyncIterator[list[str]]:
    """Execute rollouts; the reward is the fraction of good words in the prompt, or what `rewards` returns for
    it. Yields the prompts."""
    seen: list[str] = []

    async def work() -> None:
        while True:
            rollout = await store.dequeue_rollout("w", timeout=60.0)
            if rollout is None:
                continue
            if failure is not None:
                await store.finish_attempt(rollout, "failed", failure=failure)
                continue
            resources = (await store.get_resources_by_id(rollout.resources_id or "")).resources
            text = resources["prompt"].template
            seen.append(text)
            if rewards is not None:
                scored = rewards(text)
                if isinstance(scored, Failure):
                    await store.finish_attempt(rollout, "failed", failure=scored)
                else:
                    await store.finish_attempt(rollout, "succeeded", spans=[reward_of(rollout, scored)])
                continue
            missing = [word for word in ("politely", "briefly") if word not in text]
            told = span_of(rollout, MESSAGE, attributes={MESSAGE_BODY: f"missing: {missing}"})
            reward = reward_of(rollout, 1.0 - len(missing) / 2)
            await store.finish_attempt(rollout, "succeeded", spans=[told, reward])

    task = asyncio.create_task(work())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def algorithm(url: str, store: StoreClient, **settings: Any) -> rl.GEPA:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=20)
    found = rl.GEPA(client, **{"max_rollouts": 40, "minibatch_size": 2} | settings)
    found.set_store(store)
    found.set_initial_resources({"prompt": SEED})
    return found


async def test_reflection_on_emitted_messages_improves_the_prompt() -> None:
    store = StoreClient(StoreService())
    with serve_script(add_a_missing_word) as models:
        async with agents(store) as seen, within(60):
            gepa = algorithm(models.url, store)
            await gepa.run([1, 2, 3, 4], [5, 6, 7])
    best = gepa.get_best_prompt().template
    assert best == "Add {a}. Answer politely. Answer briefly."
    assert [candidate["val_score"] for candidate in gepa.result["candidates"]] == [0.0, 0.5, 1.0]
    assert len(seen) == gepa.result["rollouts"]
    latest = await store.get_latest_resources()
    assert latest.resources["prompt"].template == best


async def test_a_search_goes_on_in_another_folder_without_scoring_the_seed_again(tmp_path: Path) -> None:
    prompts: list[list[str]] = []
    results: list[dict[str, Any]] = []
    with serve_script(add_a_missing_word) as models:
        for budget, resume_file in ((6, None), (40, tmp_path / "6" / rl.GEPA.result_file)):
            store = StoreClient(StoreService())
            gepa = algorithm(models.url, store, max_rollouts=budget)
            folder = tmp_path / str(budget)
            nothing = lambda *args: None  # noqa: E731
            gepa.set_run_context(
                SimpleNamespace(  # type: ignore[arg-type]
                    folder=folder,
                    resume_file=resume_file,
                    step=nothing,
                    stage=nothing,
                    report_failures=nothing,
                )
            )
            async with agents(store) as seen, within(60):
                await gepa.run([1, 2, 3, 4], [5, 6, 7])
            assert gepa.result is not None
            prompts.append(seen)
            results.append(gepa.result)
    first, second = results
    assert len(prompts[0]) == first["rollouts"]
    assert len(prompts[1]) == second["rollouts"] - first["rollouts"]
    assert second["candidates"][: len(first["candidates"])] == first["candidates"]
    assert second["candidates"][second["best"]]["val_score"] == 1.0
    gepa.settings = gepa.settings.model_copy(update={"seed": 1})
    with pytest.raises(CheckpointError, match="another prompt, other tasks or other settings"):
        await gepa.run([1, 2, 3, 4], [5, 6, 7])


async def test_a_round_that_was_cut_off_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylight.store.tables.transitions.FIRST_BACKOFF_S", 0.01)
    steps: list[int] = []
    nothing = lambda *args: None  # noqa: E731
    with serve_script(lambda model, text: "```\nAdd {a} politely.\n```") as models:
        for lost, resume_file in ((LOST, None), (0.5, tmp_path / rl.GEPA.result_file)):
            store = StoreClient(StoreService())
            gepa = algorithm(models.url, store, max_rollouts=10)
            gepa.set_run_context(
                SimpleNamespace(  # type: ignore[arg-type]
                    folder=tmp_path,
                    resume_file=resume_file,
                    step=lambda step, metrics: steps.append(step),
                    stage=nothing,
                    report_failures=nothing,
                )
            )
            expected = pytest.raises(RolloutsFailedError) if lost is LOST else contextlib.nullcontext()
            rewards = {SEED.template: 0.0, "Add {a} politely.": lost}
            async with agents(store, rewards=rewards.__getitem__), within(60):
                with expected:
                    await gepa.run([1, 2], [5, 6])
    assert steps == [1, 2]


async def test_a_prompt_without_its_placeholder_is_never_rolled_out() -> None:
    store = StoreClient(StoreService())
    with serve_script(lambda model, text: "```\nAdd them politely and briefly.\n```") as models:
        async with agents(store) as seen, within(60):
            gepa = algorithm(models.url, store, max_rollouts=12)
            await gepa.run([1, 2], [5, 6])
    assert {*seen} == {SEED.template}
    assert gepa.get_best_prompt() == SEED
    assert "lacks the placeholders a" in gepa.result["rejected"][0]["reason"]


async def test_a_rewrite_without_its_placeholder_is_never_the_best_of_negative_rewards() -> None:
    store = StoreClient(StoreService())
    with serve_script(lambda model, text: "```\nAnswer briefly.\n```") as models:
        async with agents(store, rewards=lambda text: -0.5) as seen, within(60):
            gepa = algorithm(models.url, store, max_rollouts=12)
            await gepa.run([1, 2], [5, 6])
    assert gepa.get_best_prompt() == SEED
    assert [candidate["val_score"] for candidate in gepa.result["candidates"]] == [-0.5]
    assert len(seen) == gepa.result["rollouts"], "a rejected rewrite costs none"
    latest = await store.get_latest_resources()
    assert latest.resources["prompt"] == SEED


@pytest.mark.parametrize("fixed", [None, -3.0])
async def test_a_prompt_that_crashes_the_agent_is_never_better_than_an_honest_one(
    fixed: float | None,
) -> None:
    store = StoreClient(StoreService())
    with serve_script(lambda model, text: "```\nCrash {a}.\n```") as models:
        rewards = lambda text: BROKEN if "Crash" in text else -0.5  # noqa: E731
        async with agents(store, rewards=rewards) as seen, within(60):
            gepa = algorithm(models.url, store, max_rollouts=12, failure_reward=fixed)
            await gepa.run([1, 2], [5, 6])
    assert "Crash {a}." in seen
    assert gepa.get_best_prompt() == SEED


async def test_scores_of_failures_follow_the_lowest_reward_of_the_search() -> None:
    """Task 0 crashes while the lowest reward is -0.2; task 0 of the other prompt is answered at -0.6."""
    from openai import AsyncOpenAI

    trials = [[Trial(0, "failed"), Trial(1, "succeeded", -0.2)], [Trial(0, "succeeded", -0.6)] * 2]

    async def evaluate(*args: Any) -> Any:
        return SimpleNamespace(trials=trials.pop(0))

    adapter = RolloutAdapter("prompt", SEED, evaluate, AsyncOpenAI(api_key="key"), "m", None)  # type: ignore[arg-type]
    prompts, scores = [{"prompt": "crash {a}"}, {"prompt": "answer {a}"}], []
    for prompt in prompts:
        batch = await asyncio.to_thread(adapter.evaluate, [("val", 0), ("val", 1)], prompt)
        scores.append(dict(enumerate(batch.scores)))
    assert scores[0] == {0: -0.2, 1: -0.2}
    resumed = RolloutAdapter("prompt", SEED, evaluate, AsyncOpenAI(api_key="key"), "m", None)  # type: ignore[arg-type]
    resumed.set_adapter_state(adapter.get_adapter_state())
    assert resumed.val_scores(prompts, scores) == pytest.approx([(-0.6 - 0.2) / 2, -0.6])


@pytest.mark.parametrize("reply", [("```\n", "length"), "", 500])
async def test_a_model_without_a_usable_answer_costs_a_round(reply: Any) -> None:
    store = StoreClient(StoreService())
    with serve_script(lambda model, text: reply) as models:
        async with agents(store), within(60):
            gepa = algorithm(models.url, store, max_rollouts=8)
            await gepa.run([1, 2], [5, 6])
    assert gepa.get_best_prompt() == SEED
    assert gepa.result["rejected"]


async def test_a_model_that_rejects_all_requests_ends_the_search() -> None:
    store = StoreClient(StoreService())
    with serve_script(lambda model, text: 401) as models:
        async with agents(store), within(60):
            with pytest.raises(CriticError, match="reflection_model"):
                await algorithm(models.url, store).run([1, 2], [5, 6])


async def test_lost_rollouts_and_an_agent_that_always_fails_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raylight.store.tables.transitions.FIRST_BACKOFF_S", 0.01)
    for failure, message in ((LOST, "ConnectionError: gone"), (BROKEN, "ValueError: no")):
        store = StoreClient(StoreService())
        async with agents(store, failure), within(60):
            with pytest.raises(RolloutsFailedError, match=message):
                await algorithm("http://127.0.0.1:9/v1", store).run([1, 2], [5, 6])


async def test_it_can_be_cancelled() -> None:
    store = StoreClient(StoreService())
    search = asyncio.create_task(algorithm("http://127.0.0.1:9/v1", store).run([1, 2], [5, 6]))
    async with within(60):
        assert await store.dequeue_rollout("w", timeout=60.0) is not None  # nobody executes it
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search


async def test_a_call_that_begins_while_the_search_is_stopped_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread would otherwise wait for it for ever."""
    from openai import AsyncOpenAI

    begin = asyncio.run_coroutine_threadsafe
    never = asyncio.Event()

    async def evaluate(*args: Any) -> Any:
        await never.wait()

    adapter = RolloutAdapter("prompt", SEED, evaluate, AsyncOpenAI(api_key="key"), "m", None)  # type: ignore[arg-type]

    def begin_late(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        adapter.stop()
        return begin(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_late)
    with pytest.raises(asyncio.CancelledError):
        async with within(10):
            await asyncio.to_thread(adapter.evaluate, [("val", 0)], {"prompt": SEED.template})


async def test_it_needs_tasks_and_a_prompt() -> None:
    store = StoreClient(StoreService())
    gepa = algorithm("http://127.0.0.1:9/v1", store)
    with pytest.raises(DatasetError, match="val_dataset is missing"):
        await gepa.run([1], None)
    with pytest.raises(ConfigError, match="there is no best prompt yet"):
        gepa.get_best_prompt()
    gepa.set_initial_resources({})
    with pytest.raises(ConfigError, match="have no PromptTemplate"):
        await gepa.run([1], [2])


def test_a_record_has_task_output_and_feedback() -> None:
    trial = Trial({"a": 1}, "failed", None, notes=["- step"], error="ValueError: no", feedback=["be brief"])
    assert trial_record(trial) == {
        "Inputs": '{"a": 1}',
        "Generated Outputs": "- step",
        "Feedback": "Reward: none.\nThe rollout failed.\nError: ValueError: no\nbe brief",
    }
