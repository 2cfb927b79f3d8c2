"""Agents, hooks, tracers and algorithms with their own loop, on a real Ray cluster with real runners and the
durable store."""

import asyncio
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import Cluster, eventually

import raylight as rl
from raylight._utils.aio import pause
from raylight.types import FinishedRollout

LLM = {"llm": rl.LLM(endpoint="http://unused", model="fixed")}


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected(import_path=Path(__file__).parent):  # the runners import the classes below
        yield


class RunTasks(rl.FastAlgorithm):
    """Algorithm that rolls out every task once, when `n_runners` wait, and keeps the results."""

    def __init__(self, config: rl.RolloutConfig | None = None, n_runners: int = 1) -> None:
        self.config = config or rl.RolloutConfig()
        self.n_runners = n_runners
        self.results: list[FinishedRollout] = []
        self.workers: list[rl.types.Worker] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        modes = [("train", task) for task in train_dataset or []] + [
            ("val", task) for task in val_dataset or []
        ]
        requests = [
            rl.EnqueueRolloutRequest(input=task, mode=mode, config=self.config) for mode, task in modes
        ]  # type: ignore[arg-type]
        async with asyncio.timeout(100):
            while [worker.last_dequeue_time is not None for worker in await store.query_workers()].count(
                True
            ) < self.n_runners:
                await pause(0.05)
        ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        await store.wait_until_decided(rollout_ids=ids, timeout=100)
        self.results = await store.collect(ids, with_spans=True)
        self.workers = await store.query_workers()


def run_tasks(
    agent: Any, tasks: list[Any], folder: Path, val: list[Any] | None = None, **settings: Any
) -> RunTasks:
    config = settings.pop("config", None)
    algorithm = RunTasks(config, n_runners=2)
    trainer = rl.Trainer(
        algorithm=algorithm, n_runners=2, output_dir=folder, progress=False, initial_resources=LLM, **settings
    )
    trainer.summary = trainer.fit(agent, tasks, val_data=val)  # type: ignore[attr-defined]
    algorithm.summary = trainer.summary  # type: ignore[attr-defined]
    return algorithm


GRADED, RAISES, KILLS = 6, 7, 8
"""The first task that a hook grades, the one that raises an error, and the one that kills its runner."""


class EmittingAgent(rl.LitAgent):
    """Agent that records its mode in spans, emits two rewards and returns none."""

    async def training_rollout_async(
        self, task: Any, resources: rl.NamedResources, rollout: rl.Rollout
    ) -> None:
        if task == RAISES:
            raise ValueError("odd")
        if task == KILLS:
            os._exit(1)
        with rl.operation(name="think"):
            await asyncio.sleep(0.1)
        rl.emit_message(f"train {task} with {resources['llm'].model}")
        if task < GRADED:
            rl.emit_reward({"good": task / 10, "short": 1.0}, primary_key="good")

    def validation_rollout(self, task: Any, resources: rl.NamedResources, rollout: rl.Rollout) -> float:
        rl.emit_object({"val": task})
        return 0.5


class GradingHook(rl.Hook):
    def on_trace_end(self, *, rollout: rl.Rollout, spans: list[rl.Span]) -> None:
        rl.emit_message(f"{len(spans)} spans")

    async def on_rollout_end(self, *, rollout: rl.Rollout) -> None:
        await asyncio.sleep(0)
        if rollout.mode == "train" and rollout.input >= GRADED:
            rl.emit_reward(0.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def done(folder: Path) -> RunTasks:
    """Run the agent under two hooks."""
    settings = {
        "hooks": [GradingHook(), rl.LoggingHook()],
        "config": rl.RolloutConfig(infrastructure_retries=1),
    }
    return run_tasks(EmittingAgent(), list(range(12)), folder, val=[1], **settings)


def test_modes_emitters_and_rewards(done: RunTasks, folder: Path) -> None:
    by_task = {(item.rollout.mode, item.rollout.input): item for item in done.results}
    for task in range(GRADED):
        item = by_task["train", task]
        assert item.reward == task / 10
        assert rl.traces.get_rewards_from_span(rl.find_reward_spans(item.spans)[-1])[1].name == "short"
        assert item.spans[0].name == "agentlightning.operation"
    assert by_task["val", 1].reward == 0.5
    assert rl.get_object_value(by_task["val", 1].spans[0]) == {"val": 1}
    executed = {item.rollout.attempt.worker_id.split("/")[1] for item in done.results}
    assert len(executed) >= 2
    assert all(
        worker.heartbeat_stats["memory_bytes"] > 1e6 for worker in done.workers if worker.heartbeat_stats
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["by_status"] == {"succeeded": 11, "failed": 2}
    with sqlite3.connect(folder / "store.db") as db:  # acknowledged data is on disk
        assert db.execute("SELECT COUNT(*) FROM rollouts WHERE status = 'succeeded'").fetchone() == (11,)


def test_hooks_set_rewards_before_success_and_run_after_failures(done: RunTasks) -> None:
    graded, failed = done.results[GRADED], done.results[RAISES]
    assert (graded.rollout.status, graded.reward) == ("succeeded", 0.25)
    assert failed.rollout.status == "failed"
    assert failed.rollout.attempt.failure.error == "ValueError: odd"  # type: ignore[union-attr]
    assert [rl.find_final_reward(item.spans) for item in (graded, failed)] == [0.25, 0.25]


def test_an_agent_that_kills_its_runner_costs_only_itself(done: RunTasks) -> None:
    failed = {item.rollout.input for item in done.results if item.rollout.status == "failed"}
    assert failed == {RAISES, KILLS}


@rl.rollout
def failing_on_odd(task: int) -> None:
    if task % 2:
        raise ValueError("odd")


@rl.rollout
def hangs(task: int) -> float:
    import threading

    if task >= 0:
        threading.Event().wait()
    return 1.0


@pytest.mark.slow
def test_agents_that_hang_are_left_alone_and_their_runner_is_replaced(tmp_path: Path) -> None:
    from raylight.runner.runner import MAX_HUNG_AGENTS

    tasks = [*range(3 * MAX_HUNG_AGENTS), *[-1] * 20]
    done = run_tasks(
        hangs, tasks, tmp_path, config=rl.RolloutConfig(timeout_seconds=3.0), runner={"max_concurrent": 12}
    )
    by_status = Counter((item.rollout.status, item.rollout.input >= 0) for item in done.results)
    assert by_status == {("failed", True): 3 * MAX_HUNG_AGENTS, ("succeeded", False): 20}
    assert {item.rollout.attempt.status for item in done.results if item.rollout.attempt} == {
        "timeout",
        "succeeded",
    }
    assert done.summary["counts"]["runners_replaced"] >= 1  # type: ignore[attr-defined]
    assert done.summary["counts"]["runners_lost"] == 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_agent_that_blocks_the_event_loop_costs_its_runner_but_no_other_rollout(tmp_path: Path) -> None:
    marker = tmp_path / "blocked"

    @rl.rollout
    async def blocks_once(task: int) -> float:
        import threading

        if task == 0:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return 1.0
            threading.Event().wait()
        return 1.0

    done = run_tasks(blocks_once, list(range(10)), tmp_path / "run", runner={"stuck_after_s": 3.0})
    assert {item.rollout.status for item in done.results} == {"succeeded"}
    assert done.summary["counts"]["runners_lost"] == 1  # type: ignore[attr-defined]


def lower_limits(for_good: bool) -> None:
    """Leave this process 96 MiB more memory than it has, and few files; permanently by giving up the right to
    raise them again, which root has."""
    import ctypes
    import resource

    import psutil

    if for_good:
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # this thread
        assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0
    memory = psutil.Process().memory_info().vms + 96 * 2**20
    hard = (memory, memory) if for_good else (memory, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("for_good", [False, True])
def test_an_agent_that_lowers_the_limits_of_its_runner_ruins_no_other_rollout(
    tmp_path: Path, for_good: bool
) -> None:
    @rl.rollout
    async def hungry(task: int) -> float:
        if task < 4:
            lower_limits(for_good)
        return len(bytearray(512 * 2**20)) / 2**29

    done = run_tasks(hungry, list(range(12)), tmp_path, runner={"max_concurrent": 1})
    ends = {item.rollout.input: item.rollout.status for item in done.results}
    assert ends == {task: "failed" if task < 4 else "succeeded" for task in range(12)}
    errors = {item.rollout.attempt.failure.error for item in done.results[:4]}  # type: ignore[union-attr]
    assert errors == {"MemoryError:"}
    counts = done.summary["counts"]  # type: ignore[attr-defined]
    assert counts["runners_lost"] == 0
    # a soft limit can be lifted again, if the runner has memory for it
    assert counts["runners_replaced"] in ([4] if for_good else range(5))


@pytest.mark.slow
def test_max_rollouts_ends_runners_and_fails_the_remaining_rollouts(tmp_path: Path) -> None:
    @rl.rollout
    def quick(task: int) -> float:
        return 1.0

    done = run_tasks(quick, list(range(10)), tmp_path, max_rollouts=3)
    assert Counter(item.rollout.status for item in done.results) == {"succeeded": 6, "failed": 4}
    errors = {
        item.rollout.attempt.failure.error
        for item in done.results
        if item.rollout.attempt and item.rollout.attempt.failure
    }
    assert len(errors) == 1
    assert "max_rollouts=3" in errors.pop()


@pytest.mark.slow
def test_dev_shows_what_the_agent_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = rl.Trainer(agent=EmittingAgent(), output_dir=tmp_path, initial_resources=LLM)
    trainer.dev(train_dataset=[1, 2, 3, 4])
    shown = capsys.readouterr().out
    assert "agentlightning.operation" in shown
    assert "4 rollouts" in shown
    with pytest.raises(TypeError, match="FastAlgorithm"):
        rl.Trainer(algorithm=rl.GRPO(model="anything"), agent=EmittingAgent()).dev(train_dataset=[1])


@pytest.mark.slow
async def test_train_can_be_awaited_and_cancelled(tmp_path: Path) -> None:
    trainer = rl.Trainer(algorithm=RunTasks(), agent=failing_on_odd, output_dir=tmp_path, progress=False)
    summary = await trainer.train([0, 2, 4])
    assert summary["by_status"] == {"succeeded": 3}

    @rl.rollout
    async def endless(task: int) -> float:
        await asyncio.Event().wait()
        return 0.0

    running = asyncio.create_task(trainer.train(endless, [0]))
    import ray

    deadline = asyncio.get_running_loop().time() + 60
    while not (ray.util.list_named_actors(all_namespaces=True) or running.done()):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    eventually(lambda: not ray.util.list_named_actors(all_namespaces=True), 20, "the end of the run's actors")


@pytest.mark.slow
def test_a_store_passed_by_the_user_outlives_the_run(tmp_path: Path) -> None:
    import ray

    from raylight.config import StoreConfig
    from raylight.store.actor import start_store

    actor = start_store("mine", str(tmp_path / "mine.db"), StoreConfig())
    client = rl.StoreClient(actor)
    for run in (1, 2):  # the first run's runners have ended and take no rollout of the second run
        done = run_tasks(failing_on_odd, [0, 2], tmp_path / f"run-{run}", store=client)
        assert [item.rollout.attempt.sequence_id for item in done.results if item.rollout.attempt] == [1, 1]
        assert asyncio.run(_count(client)) == 2 * run
    ray.kill(actor)


async def _count(client: rl.StoreClient) -> int:
    return len(await client.query_rollouts(status_in=["succeeded"]))
