"""Baseline with a store in this process and a minimal runner."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from unit_helpers import within

from raylight.algorithms.base import FastAlgorithm
from raylight.algorithms.baseline import Baseline, split_samples
from raylight.errors import ConfigError, DatasetError
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.trace_adapter import TraceAdapter
from raylight.types import EnqueueRolloutRequest, Failure, Rollout, RolloutConfig, Span

Agent = Callable[[Rollout], float | Failure | None]


async def run_rollouts(store: StoreClient, agent: Agent, seen: list[Rollout]) -> None:
    """Run rollouts one by one, each with a span and a reward."""
    while True:
        rollout = await store.dequeue_rollout("runner-1", timeout=60.0)
        assert rollout.attempt is not None
        seen.append(rollout)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        spans = [
            Span.from_attributes(
                name="step", attributes={"tool": "calculator"}, start_time=1.0, end_time=1.25, **ids
            )
        ]
        result = agent(rollout)
        if isinstance(result, float):
            spans.append(
                Span.from_attributes(
                    name=ANNOTATION, attributes=dict(reward_attributes({"primary": result})), **ids
                )
            )
        failure = result if isinstance(result, Failure) else None
        await store.finish_attempt(rollout, "failed" if failure else "succeeded", failure, spans)


@contextlib.asynccontextmanager
async def runner(store: StoreClient, agent: Agent) -> AsyncIterator[list[Rollout]]:
    seen: list[Rollout] = []
    work = asyncio.create_task(run_rollouts(store, agent, seen))
    try:
        async with within():
            yield seen
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def ready(**settings: Any) -> tuple[Baseline, StoreClient]:
    baseline, store = Baseline(**settings), StoreClient(StoreService())
    baseline.set_store(store)
    return baseline, store


async def test_it_runs_every_sample_and_sums_up(
    capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "raylight")
    baseline, store = ready()
    async with runner(store, lambda rollout: rollout.input / 2) as seen:
        await baseline.run([1, 2], [3, 4])
    assert [(rollout.mode, rollout.input) for rollout in seen] == [
        ("train", 1),
        ("train", 2),
        ("val", 3),
        ("val", 4),
    ]
    assert baseline.summary == {
        "rollouts": 4,
        "succeeded": 4,
        "unscored": 0,
        "mean_reward": 1.25,
        "mean_reward_by_mode": {"train": 0.75, "val": 1.75},
        "failures": {},
    }
    printed = capsys.readouterr().out
    for text in (printed, caplog.text):
        assert f"{seen[0].rollout_id} (train) succeeded, reward 0.5" in text
        assert "attempt 1 by runner-1: succeeded" in text
        assert "#1 step, 0.25 s: tool" in text
        assert "calculator" not in text
    assert "mean reward" in printed
    assert "1.250" in printed


async def test_each_epoch_runs_every_sample() -> None:
    baseline, store = ready(n_epochs=3)
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run([1], [2])
    assert [rollout.input for rollout in seen] == [1, 2] * 3


async def test_a_second_run_counts_from_zero() -> None:
    baseline, store = ready()
    async with runner(store, lambda rollout: 1.0):
        await baseline.run([1, 2])
        await baseline.run([1])
    assert baseline.summary["rollouts"] == 1


@pytest.mark.parametrize(
    ("n_train", "n_val", "split", "modes"),
    [
        (4, 0, 0.5, "ttvv"),
        (10, 0, 0.8, "ttttttttvv"),
        (1, 0, 0.5, "t"),
        (2, 0, 0.99, "tv"),
        (2, 0, 0.01, "tv"),
        (2, 1, 0.5, "ttv"),
        (0, 2, 0.5, "vv"),
    ],
)
def test_the_split_of_samples(n_train: int, n_val: int, split: float, modes: str) -> None:
    train, val = list(range(n_train)), list(range(n_train, n_train + n_val))
    samples = split_samples(train, val, split)
    assert "".join(mode[0] for mode, _ in samples) == modes
    assert [task for _, task in samples] == train + val


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        (([], []), "no samples to run the agent on; give a train_dataset or a val_dataset"),
        ((None, None), "no samples to run the agent on"),
        (("text", None), "train_dataset is a str; pass a list"),
        (([1], iter([1])), "val_dataset is a list_iterator; pass a list"),
    ],
)
async def test_invalid_datasets_are_an_error(datasets: tuple[Any, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        await ready()[0].run(*datasets)


async def test_a_dataset_need_only_have_a_length_and_an_index() -> None:
    class Squares:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            if i >= 100:
                raise IndexError
            return i * i

    baseline, store = ready()
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run(Squares())
    assert [rollout.input for rollout in seen] == [0, 1, 4]


async def test_few_rollouts_wait_at_a_time() -> None:
    baseline, store = ready(max_queue_length=2)
    most = 0
    added: list[int] = []
    enqueue = store.enqueue_many_rollouts

    async def counting(requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        nonlocal most
        queued = await enqueue(requests)
        added.append(len(requests))
        counts = await store.statistics()
        most = max(most, counts.get("rollouts_queuing", 0))
        return queued

    store.enqueue_many_rollouts = counting  # type: ignore[method-assign]
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run(list(range(9)))
    assert len(seen) == 9
    assert sum(added) == 9
    assert most <= 2
    assert max(added) == 2


async def test_a_queue_full_of_others_does_not_stop_it() -> None:
    baseline, store = ready(max_queue_length=1)
    others = [await store.enqueue_rollout("other") for _ in range(3)]
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run([1, 2])
    assert {1, 2} <= {rollout.input for rollout in seen}
    assert baseline.summary["rollouts"] == 2
    assert len(others) == 3


async def test_failures_are_counted_by_error_and_shown_once_with_their_trace(
    capsys: pytest.CaptureFixture,
) -> None:
    broken = Failure(kind="agent", error="ValueError: no answer", trace="File agent.py, line 7")

    def agent(rollout: Rollout) -> float | Failure | None:
        return {0: broken, 1: broken, 2: Failure(kind="agent", error="KeyError: 'x'"), 3: None, 4: 0.5}[
            rollout.input
        ]

    baseline, store = ready()
    async with runner(store, agent):
        await baseline.run([0, 1, 2, 3, 4])
    assert baseline.summary["failures"] == {"ValueError: no answer": 2, "KeyError: 'x'": 1}
    assert baseline.summary["mean_reward"] == 0.5
    assert baseline.summary["unscored"] == 1
    printed = capsys.readouterr().out
    assert printed.count("agent: ValueError: no answer") == 2
    assert printed.count("File agent.py, line 7") == 1
    assert "2 failed: ValueError: no answer" in printed
    assert "1 succeeded without a reward" in printed


async def test_every_attempt_is_shown(capsys: pytest.CaptureFixture) -> None:
    baseline, store = ready()
    again = RolloutConfig(max_attempts=2, retry_condition=frozenset({"failed"}))
    enqueue = store.enqueue_many_rollouts

    async def with_retries(requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        return await enqueue([request.model_copy(update={"config": again}) for request in requests])

    def agent(rollout: Rollout) -> float | Failure:
        return Failure(kind="agent", error="OSError: flaky") if rollout.attempt.sequence_id == 1 else 1.0

    store.enqueue_many_rollouts = with_retries  # type: ignore[method-assign]
    async with runner(store, agent):
        await baseline.run([1])
    printed = capsys.readouterr().out
    assert "attempt 1 by runner-1: failed" in printed
    assert "agent: OSError: flaky" in printed
    assert "attempt 2 by runner-1: succeeded" in printed
    assert printed.count(" step, 0.25 s") == 2
    assert baseline.summary["failures"] == {}


async def test_a_cancelled_rollout_is_a_failure(capsys: pytest.CaptureFixture) -> None:
    baseline, store = ready()
    enqueue = store.enqueue_many_rollouts

    async def cancelling(requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        return await store.cancel_rollouts([rollout.rollout_id for rollout in await enqueue(requests)])

    store.enqueue_many_rollouts = cancelling  # type: ignore[method-assign]
    async with within():
        await baseline.run([1])
    assert baseline.summary["failures"] == {"cancelled": 1}
    assert "(train) cancelled, no reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verbosity", "shown"), [("none", []), ("keys", ["tool"]), ("key_values", ["tool = calculator"])]
)
async def test_span_verbosity(verbosity: Any, shown: list[str], capsys: pytest.CaptureFixture) -> None:
    baseline, store = ready(span_verbosity=verbosity)
    async with runner(store, lambda rollout: 0.25):
        await baseline.run([1])
    printed = capsys.readouterr().out
    assert "reward 0.25" in printed
    assert ("#1 step" in printed) == bool(shown)
    assert all(text in printed for text in shown)


async def test_a_long_sample_and_markup_are_printed_as_text(capsys: pytest.CaptureFixture) -> None:
    baseline, store = ready()
    async with runner(store, lambda rollout: 0.25):
        await baseline.run(["[bold]x[/nonsense]" + "y" * 1000])
    printed = capsys.readouterr().out
    assert "[bold]x[/nonsense]yyy" in printed
    assert "… (1018 characters)" in printed
    assert "y" * 400 not in printed


async def test_initial_resources_go_with_the_rollouts() -> None:
    baseline, store = ready()
    baseline.set_initial_resources({"prompt": "think"})
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run([1])
    assert seen[0].resources_id is not None
    assert (await store.get_resources_by_id(seen[0].resources_id)).resources == {"prompt": "think"}


class Trains:
    """Stand-in for a Trainer, with the attributes that Baseline reads."""

    def __init__(self, progress: bool = True) -> None:
        self.progress = progress


async def test_resources_that_a_trainer_has_stored_are_not_stored_again() -> None:
    baseline, store = ready()
    trainer, stored = Trains(), await store.add_resources({"prompt": "think"})
    baseline.set_trainer(trainer)
    baseline.set_initial_resources({"prompt": "think"})
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run([1])
    assert seen[0].resources_id == stored.resources_id
    assert len(await store.query_resources()) == 1


@pytest.mark.parametrize("progress", [True, False])
async def test_without_progress_it_is_silent_but_logs(
    progress: bool, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "raylight")
    baseline, store = ready()
    trainer = Trains(progress)
    baseline.set_trainer(trainer)
    async with runner(store, lambda rollout: 1.0):
        await baseline.run([1])
    assert bool(capsys.readouterr().out) == progress
    assert "succeeded, reward 1" in caplog.text
    assert baseline.summary["mean_reward"] == 1.0


async def test_without_resources_of_its_own_the_latest_are_used() -> None:
    baseline, store = ready()
    latest = await store.add_resources({"prompt": "there before"})
    async with runner(store, lambda rollout: 1.0) as seen:
        await baseline.run([1])
    assert seen[0].resources_id == latest.resources_id
    assert len(await store.query_resources()) == 1


async def test_the_adapter_is_tried_on_the_spans(capsys: pytest.CaptureFixture) -> None:
    class Names(TraceAdapter[list[str]]):
        def adapt(self, source: Sequence[Span], /) -> list[str]:
            return [span.name for span in source]

    baseline, store = ready(span_verbosity="none")
    baseline.set_adapter(Names())
    async with runner(store, lambda rollout: 1.0):
        await baseline.run([1])
    assert f"Names returns: ['step', '{ANNOTATION}']" in capsys.readouterr().out


async def test_it_tells_that_nobody_takes_the_rollouts(capsys: pytest.CaptureFixture) -> None:
    baseline, store = ready(polling_interval=0.01)
    printed = ""
    async with within():
        work = asyncio.create_task(baseline.run([1, 2]))
        while "0/2 finished" not in printed:
            await asyncio.sleep(0.01)
            printed += capsys.readouterr().out
        assert (
            "0/2 finished; 0 running, 2 waiting for a runner (no rollout is running; check that runners are "
            "alive)" in printed
        )
        async with runner(store, lambda rollout: 1.0):
            await work


async def test_a_runner_with_much_room_is_filled_when_the_interval_is_over() -> None:
    baseline, store = ready(max_queue_length=1, polling_interval=0.01)
    async with within():
        work = asyncio.create_task(baseline.run([1, 2, 3]))
        taken = [await store.dequeue_rollout("w", timeout=10.0) for _ in range(3)]
        for rollout in taken:
            assert rollout is not None
            await store.finish_attempt(rollout, "succeeded")
        await work


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_epochs": 0},
        {"train_split": 0.0},
        {"train_split": 1.0},
        {"polling_interval": 0},
        {"max_queue_length": 0},
        {"span_verbosity": "all"},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Baseline(**wrong)


async def test_without_a_store_it_says_so() -> None:
    with pytest.raises(ConfigError, match="Baseline has no store"):
        await Baseline().run([1])


def test_it_is_fast_and_asynchronous_and_waits_without_an_interval() -> None:
    assert isinstance(Baseline(polling_interval=None), FastAlgorithm)
    assert Baseline().is_async()
