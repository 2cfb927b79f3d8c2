"""APO around its search: rollouts through a store in this process, files, and rejected arguments."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from unit_helpers import within

import raylight as rl
from raylight.algorithms.apo.algorithm import APO, fingerprint, print_result, prompt_table, round_metrics
from raylight.algorithms.apo.evaluator import PromptEvaluator
from raylight.algorithms.apo.history import History, Rejection
from raylight.errors import CheckpointError, ConfigError, DatasetError, PromptError, RolloutsFailedError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.messages import TraceToMessages
from raylight.types import Failure, FinishedRollout, Rollout
from unit.algorithms.test_baseline import Agent, runner

SEED = rl.PromptTemplate(template="add {a}")
BROKEN = Failure(kind="agent", error="ValueError: no")
LOST = Failure(kind="infrastructure", error="ConnectionError: gone")


def client() -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


def evaluator(store: StoreClient, timeout: float = 5.0, reported: list[Any] | None = None) -> PromptEvaluator:
    reports: list[Any] = [] if reported is None else reported
    return PromptEvaluator(
        store,
        {"judge": 1},
        "prompt",
        {"train": [10, 11, 12], "val": [20, 21]},
        timeout,
        TraceToMessages(),
        report_failures=reports.append,
    )


async def test_a_prompt_is_rolled_out_with_all_resources() -> None:
    store, reported = StoreClient(StoreService()), list[list[FinishedRollout]]()
    evaluate = evaluator(store, reported=reported)
    async with runner(store, lambda rollout: float(rollout.input)) as seen:
        found = await evaluate(SEED, [2, 0], "train")
        assert (await evaluate(SEED, [1], "val")).score(0.0) == 21.0
    assert [trial.task for trial in found.trials] == [12, 10]
    assert found.score(0.0) == 11.0
    assert found.trials[0].notes == ["- step: tool='calculator'"]
    assert [rollout.mode for rollout in seen] == ["train", "train", "val"]
    assert len({rollout.resources_id for rollout in seen}) == 1, "a prompt is stored once"
    update = await store.get_resources_by_id(seen[0].resources_id or "")
    assert update.resources == {"judge": 1, "prompt": SEED}
    assert [len(finished) for finished in reported] == [2, 1]


@pytest.fixture
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a lost rollout run again almost at once, so that its retries fit into an evaluation's timeout."""
    monkeypatch.setattr("raylight.store.tables.transitions.FIRST_BACKOFF_S", 0.01)


@pytest.mark.usefixtures("short_backoff")
async def test_rollouts_out_of_time_are_cancelled_and_lost_ones_left_out() -> None:
    store = StoreClient(StoreService())
    evaluate = evaluator(store, timeout=0.05)
    found = await evaluate(SEED, [0, 1], "val")  # nobody takes them
    assert found.score(0.0) == 0.0
    assert found.problems() == "2 timed out"
    assert await store.dequeue_rollout("w") is None, "they left the queue"

    def mixed(rollout: Rollout) -> float | Failure:
        return {10: 4.0, 11: BROKEN, 12: LOST}[rollout.input]

    evaluate = evaluator(store)
    async with runner(store, mixed), within():
        found = await evaluate(SEED, [0, 1, 2], "train")
    assert found.problems() == "1 failed, 1 lost"
    assert found.score(0.0) == 2.0
    assert found.trials[1].error == "ValueError: no"


@pytest.mark.usefixtures("short_backoff")
@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (lambda rollout: BROKEN, "ValueError: no"),
        (lambda rollout: LOST, "ConnectionError"),
        (lambda rollout: None, "return a float"),
    ],
)
async def test_rollouts_that_say_nothing_of_the_prompt_end_the_search(agent: Agent, message: str) -> None:
    store = StoreClient(StoreService())
    async with runner(store, agent):
        with pytest.raises(RolloutsFailedError, match=message):
            await evaluator(store)(SEED, [0, 1], "val")


async def test_once_the_agent_has_worked_a_prompt_with_which_it_fails_scores_nothing() -> None:
    store, answers = StoreClient(StoreService()), iter([1.0, 1.0, BROKEN, BROKEN, None, None])
    evaluate = evaluator(store)
    async with runner(store, lambda rollout: next(answers)):
        assert (await evaluate(SEED, [0, 1], "val")).score(0.0) == 1.0
        assert (await evaluate(SEED, [0, 1], "val")).score(0.0) == 0.0
        assert (await evaluate(SEED, [0, 1], "val")).score(0.0) == 0.0, (
            "nor does one with which it gives no reward"
        )


async def test_a_prompt_that_many_ask_for_at_once_is_stored_once() -> None:
    store = StoreClient(StoreService())
    evaluate = evaluator(store)
    async with runner(store, lambda rollout: 1.0):
        await asyncio.gather(*(evaluate(SEED, [place], "train") for place in range(3)))
    assert len(await store.query_resources()) == 1


async def test_a_resumed_search_may_begin_with_failing_prompts(tmp_path: Path) -> None:
    """Its saved scores show that the agent works, so failures are the prompt's fault."""
    history = History.begin(SEED, "prompt", fingerprint([2]), {})
    history.candidates[0].val_score = history.candidates[0].batch_scores[1] = 0.5
    history.add(rl.PromptTemplate(template="break {a}"), "v0", 1, "too tame")
    history.generated = 1
    history.save(tmp_path / "apo.json")
    algorithm, store = ready({"prompt": SEED}, beam_rounds=1)
    algorithm.set_run_context(ResumedContext(tmp_path))  # type: ignore[arg-type]
    async with runner(store, lambda rollout: BROKEN):
        await algorithm.run([1], [2])
    assert [candidate.batch_scores for candidate in algorithm.history.candidates] == [{1: 0.5}, {1: 0.0}]
    assert algorithm.get_best_prompt() == SEED


class ResumedContext:
    """Minimal run context of a resumed search."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.resume_file = folder, folder / "apo.json"
        self.rows: dict[int, dict[str, float]] = {}

    def report_failures(self, finished: list[FinishedRollout]) -> None: ...

    def progress(self, text: str) -> None: ...

    def stage(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.rows[step] = metrics


def grown() -> History:
    history = History.begin(SEED, "prompt", "2 tasks", {})
    history.candidates[0].val_score, history.candidates[0].batch_scores = 0.25, {1: 0.25}
    for place, text in enumerate(["sum {a} [bold]", "{a}!", "please\nadd {a} " + "x" * 80]):
        added = history.add(
            rl.PromptTemplate(template=text), "v0" if place < 2 else "v1", 1 if place < 2 else 2, "too long"
        )
        added.batch_scores[added.round] = place / 2
    history.candidates[2].val_score = 0.5
    history.rejections = [Rejection(parent="v0", round=1, kind="placeholders", reason="lost a", text="add")]
    history.beams += [["v2", "v0"]]
    history.best, history.generated = "v2", 1
    return history


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    history = grown()
    history.save(tmp_path / "apo.json")
    assert History.load(tmp_path / "apo.json") == history
    assert not list(tmp_path.glob("*.partial"))
    again = json.loads((tmp_path / "apo.json").read_text())
    assert again["candidates"][3]["parent"] == "v1"
    history.check_same_search(SEED, "prompt", "2 tasks", tmp_path)
    for seed, name, tasks in (
        (SEED, "other", "2 tasks"),
        (SEED, "prompt", "3"),
        (rl.PromptTemplate(template="x"), "prompt", "2 tasks"),
    ):
        with pytest.raises(CheckpointError, match="another"):
            history.check_same_search(seed, name, tasks, tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"resource": 1'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "apo.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a result of APO"):
        History.load(tmp_path / "apo.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        History.load(tmp_path)


def test_the_table_and_the_tree_have_every_prompt(tmp_path: Path) -> None:
    history = grown()
    console = Console(record=True, width=160, file=(tmp_path / "shown").open("w"))
    print_result(history, console)
    shown = console.export_text()
    rows = [line for line in shown.splitlines() if line.startswith("│ v")]
    assert len(rows) == 4
    assert "v2 *" in rows[2]
    assert "0.500" in rows[2]
    assert "[bold]" in rows[1], "a prompt is text, not markup"
    assert "please add {a} xxx" in rows[3]
    assert "…" in rows[3]
    assert "1 rewrites rejected: 1 placeholders" in shown
    assert "best prompt: v2, validation 0.500; the seed 0.250" in shown
    assert prompt_table(History.begin(SEED, "p", "t", {})).row_count == 1


def test_the_figures_of_a_round() -> None:
    assert round_metrics(grown(), 2.0) == {
        "val/reward": 0.5,
        "apo/best": 0.5,
        "apo/beam_mean": 0.375,
        "apo/made": 2.0,
        "apo/rejected": 1.0,
        "time/round_s": 2.0,
    }


def ready(resources: dict[str, Any] | None = None, **settings: Any) -> tuple[APO, StoreClient]:
    algorithm, store = APO(client(), **settings), StoreClient(StoreService())
    algorithm.set_store(store)
    algorithm.set_initial_resources(
        {"n": 1, "prompt": SEED, "other": rl.PromptTemplate(template="x")} if resources is None else resources
    )
    return algorithm, store


async def test_the_seed_is_the_first_prompt_and_the_best_is_left_as_the_latest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    algorithm, store = ready(beam_rounds=0)
    with pytest.raises(ConfigError, match="run APO first"):
        algorithm.get_best_prompt()
    async with runner(store, lambda rollout: 0.75):
        await algorithm.run([1], [2, 3])
    assert algorithm.get_best_prompt() == SEED
    assert algorithm.history.best_candidate.val_score == 0.75
    latest = await store.get_latest_resources()
    assert latest.resources["prompt"] == SEED
    assert latest.resources["n"] == 1
    assert "best prompt: v0, validation 0.750" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("resources", "train", "val", "error", "message"),
    [
        ({}, [1], [1], ConfigError, "PromptTemplate"),
        ({"p": rl.PromptTemplate(template="{a")}, [1], [1], PromptError, "'p'"),
        (None, None, [1], DatasetError, "train_dataset is missing"),
        (None, [1], [], DatasetError, "val_dataset is missing"),
        (None, "tasks", [1], DatasetError, "train_dataset is a str"),
    ],
)
async def test_what_it_cannot_begin_with(
    resources: Any, train: Any, val: Any, error: type, message: str
) -> None:
    algorithm, _ = ready(resources)
    with pytest.raises(error, match=message):
        await algorithm.run(train, val)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"branch_factor": 0},
        {"beam_rounds": -1},
        {"gradient_batch_size": 0},
        {"val_batch_size": 0},
        {"diversity_temperature": 3.0},
        {"rollout_batch_timeout": 0},
        {"gradient_model": ""},
        {"max_concurrent": 0},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        APO(client(), **wrong)
    with pytest.raises(ConfigError, match="AsyncOpenAI"):
        APO("https://api.example.com")  # type: ignore[arg-type]


def test_the_type_of_its_tasks_may_be_named() -> None:
    assert APO[dict[str, Any]](client(), beam_width=2).settings.beam_width == 2


def test_what_a_trainer_sees_of_it(planned_runs: list[Any], tmp_path: Path) -> None:
    from unit_helpers import ReachedRay

    @rl.rollout
    def agent(task: int, prompt_template: rl.PromptTemplate) -> float:
        return 1.0

    algorithm = rl.APO(client(), beam_rounds=5)
    trainer = rl.Trainer(
        algorithm=algorithm, initial_resources={"prompt_template": SEED}, output_dir=tmp_path
    )
    with pytest.raises(ReachedRay):
        trainer.fit(agent, [1], [2])
    (run,) = planned_runs
    assert run.total_steps == 5
    assert run.config(trainer._given)["algorithm"]["beam_width"] == 4
    assert run.resume_file is None
    (tmp_path / "apo.json").write_text("{}")
    with pytest.raises(ReachedRay):
        trainer.fit(agent, [1], [2], resume="auto")
    assert planned_runs[1].resume_file == tmp_path / "apo.json"
    with pytest.raises(ReachedRay):
        trainer.fit(agent, [1], [2], resume=str(tmp_path / "apo.json"))
    with pytest.raises(ConfigError, match="serves no model"):
        rl.Trainer(
            algorithm=algorithm, engine={"port": 8000}, initial_resources={"prompt_template": SEED}
        ).fit(agent, [1], [2])
    with pytest.raises(ConfigError, match="output_dir"):
        rl.Trainer(algorithm=algorithm, initial_resources={"prompt_template": SEED}).fit(
            agent, [1], [2], resume=True
        )


def test_an_adapter_that_makes_no_conversations_is_refused() -> None:
    algorithm, _ = ready()
    assert isinstance(algorithm.get_adapter(), TraceToMessages)
    trainer = rl.Trainer(algorithm=algorithm, adapter=rl.TracerTraceToTriplet())
    algorithm.set_trainer(trainer)
    with pytest.raises(ConfigError, match="TracerTraceToTriplet"):
        algorithm.get_adapter()
    mine = TraceToMessages()
    trainer.adapter = mine
    assert algorithm.get_adapter() is mine


async def test_it_can_be_cancelled() -> None:
    algorithm, store = ready()
    running = asyncio.create_task(algorithm.run([1], [2]))
    async with within():
        while not (await store.statistics()).get("rollouts_queuing"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def versions_of(history: History, rounds: Sequence[int]) -> list[str]:
    return [candidate.version for number in rounds for candidate in history.created_in(number)]


def test_candidates_by_round() -> None:
    assert versions_of(grown(), [0, 1, 2]) == ["v0", "v1", "v2", "v3"]
    assert grown().candidates[0].last_score == 0.25
    assert History.begin(SEED, "p", "t", {}).candidates[0].last_score is None
