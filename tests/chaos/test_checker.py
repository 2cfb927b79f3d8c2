"""The checker finds each kind of fault in the records of a run, and none in a correct run."""

import asyncio
import contextlib
import itertools
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos_checker import check
from chaos_evidence import Plan, count_findings, read_evidence
from chaos_log import BATCHES, LOG, reward_of
from store_helpers import LOST, Box, ids_of, open_box, span_of
from store_helpers import reward_of as reward_span
from unit_helpers import make_generation

from raylight.semconv import CALL_ID, OUTPUT_MESSAGES
from raylight.types import CallKey, EnqueueRolloutRequest, Rollout, StepGroups

PLAN = Plan(steps=2, tasks=1, samples=2, max_staleness=1, stale="drop")
GROUPS = {1: StepGroups((0,)), 2: StepGroups((2,), dropped=(1,))}
"""Groups that each step took. The dropped one is the same age as a trained one, which the checker accepts."""
TOKENS = 4
"""Tokens of a group: its rollouts have two calls with a token each."""
ROLLOUTS = [f"abc-train-{group}-{sample}" for group in range(3) for sample in range(PLAN.samples)]
_times = itertools.count(100.0)


def append(file: Path, line: dict) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def log_attempt(folder: Path, rollout: Rollout, answers: list[str], **end: Any) -> None:
    rollout_id, attempt_id = ids_of(rollout)
    times = {"began": next(_times), "at": next(_times)}
    append(folder / LOG, {"rollout": rollout_id, "attempt": attempt_id, "answers": answers, **times, **end})


async def add_group(box: Box, folder: Path, group: int, version: int) -> dict[str, float]:
    """Execute the rollouts of a group; return their rewards."""
    names = [name for name in ROLLOUTS if name.startswith(f"abc-train-{group}-")]
    return {name: await add_rollout(box, folder, name, version) for name in names}


async def add_rollout(box: Box, folder: Path, name: str, version: int) -> float:
    """Execute a rollout: an attempt that is lost, and one with two calls; return the reward."""
    mode = "train" if "train" in name else "val"
    await box.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, mode=mode, rollout_id=name)])
    lost = await box.again()
    log_attempt(folder, lost, [], raised="gone")
    await box.store.finish_attempt(lost, "failed", LOST)
    rollout = await box.again()
    answers = [f"{name} {number}" for number in range(2)]
    for answer in answers:
        key = CallKey(*ids_of(rollout), answer.replace(" ", "_").ljust(32, "_"))
        message = json.dumps([{"role": "assistant", "content": answer}])
        span = span_of(rollout, attributes={CALL_ID: key.call_id, OUTPUT_MESSAGES: message})
        call = make_generation([1], [2], key=key, versions=[version])
        await box.store.capture([(key, 0.0)], [])
        await box.store.capture([], [(key, call, span)])
    reward = reward_of(answers)
    log_attempt(folder, rollout, answers, reward=reward)
    await box.store.add_span(reward_span(rollout, reward))
    await box.store.finish_attempt(rollout, "succeeded")
    return reward


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a correct run, which stays as it is."""
    folder = tmp_path_factory.mktemp("recorded")
    asyncio.run(record_run(folder))
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of a correct run."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return tmp_path


async def record_run(folder: Path) -> None:
    """Record a correct run of two steps, whose learners were restarted once. The groups of the second were
    sampled before the first one's update, and one of them was dropped."""
    add_row(folder, step=0)
    async with open_box(folder / "store.db") as box:
        rewards = [await add_group(box, folder, group, 0) for group in range(3)]
        for step, groups in GROUPS.items():
            await box.store.record_step("abc", step, groups)
            trained = rewards[groups.trained[0]]
            batch = {"rewards": trained, "version": step - 1, "oldest": 0, "driver": 1}
            append(folder / BATCHES, batch)
            append(folder / BATCHES, {"loaded": step - 1, "driver": 1})
            append(folder / BATCHES, batch)
            ledger = {"trained": step * TOKENS, "dropped": TOKENS if step == 2 else 0}
            mean = sum(trained.values()) / len(trained)
            add_row(folder, ledger, **{"step": step, "train/reward": mean, "weights/version": step})
            await add_rollout(box, folder, f"abc-val-{step}-0-0", step)
    summary = {"steps": PLAN.steps, "rollouts": len(ROLLOUTS) + 2, "rollouts_failed": 0, "rollouts_lost": 0}
    (folder / "summary.json").write_text(json.dumps(summary))


def add_row(folder: Path, ledger: dict | None = None, **row: float) -> None:
    """Append a row to metrics.jsonl; all groups are sampled before the first step."""
    counts = {"generated": 3 * TOKENS, "trained": 0, "masked": 0, "dropped": 0, "failed": 0} | (ledger or {})
    counts["open"] = 2 * counts["generated"] - sum(counts.values())
    counts["unaccounted"] = 0
    append(folder / "metrics.jsonl", row | {f"ledger/{name}": count for name, count in counts.items()})


def findings(folder: Path, **plan: Any) -> list:
    return check(read_evidence(folder, folder, replace(PLAN, **plan)))


Doctor = Callable[[Path], None]


def edit_lines(name: str, edit: Callable[[dict], dict | None]) -> Doctor:
    """Return a function that changes each line of a file, or removes those for which `edit` returns None."""

    def doctor(folder: Path) -> None:
        lines = [edit(json.loads(line)) for line in (folder / name).read_text().splitlines()]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))

    return doctor


def repeat_lines(name: str) -> Doctor:
    return lambda folder: (folder / name).write_text((folder / name).read_text() * 2) and None


def edit_store(statement: str) -> Doctor:
    """Return a function that changes the store; `:name` is the first rollout."""

    def doctor(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "store.db")) as db, db:
            assert db.execute(statement, {"name": ROLLOUTS[0]}).rowcount

    return doctor


def change(name: str, **values: Any) -> Doctor:
    """Return a function that changes the lines of a file that have these keys."""

    def edit(line: dict) -> dict:
        changed = {key.replace("__", "/"): value for key, value in values.items()}
        return {**line, **{key: value for key, value in changed.items() if key in line}}

    return edit_lines(name, edit)


def record(step: int, trained: list[int], dropped: list[int]) -> Doctor:
    """Return a function that changes the groups of a recorded step."""
    groups = json.dumps([trained, dropped])
    return edit_store(f"UPDATE steps SET groups = '{groups}' WHERE step = {step} AND :name = :name")


def reward_again(number: int) -> Doctor:
    """Return a function that changes the rewards of one of the batches of the same step."""

    def doctor(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / BATCHES).read_text().splitlines()]
        batch = [line for line in lines if "rewards" in line][number]
        batch["rewards"] = {name: reward + 0.25 for name, reward in batch["rewards"].items()}
        (folder / BATCHES).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return doctor


def sample_again(folder: Path) -> None:
    """Let an agent run for a rollout that has succeeded."""
    line = json.loads((folder / LOG).read_text().splitlines()[0])
    append(folder / LOG, {**line, "attempt": "at-late", "began": next(_times), "at": next(_times)})


def last_row(**values: float) -> Doctor:
    """Return a function that changes the metrics of the last step."""

    def edit(row: dict) -> dict:
        changed = {key.replace("__", "/"): value for key, value in values.items()}
        return {**row, **changed} if row["step"] == PLAN.steps else row

    return edit_lines("metrics.jsonl", edit)


def raise_instead(line: dict) -> dict:
    line.pop("reward", None)
    return {**line, "raised": "gone"}


OF_ROLLOUT = "WHERE rollout_id = :name"
DOCTORED: dict[str, tuple[str, Doctor]] = {
    "1 of 2 rollouts": ("lost", edit_store(f"DELETE FROM rollouts {OF_ROLLOUT}")),
    "step 2 took 0 of 1 groups": ("lost", record(2, [], [1])),
    "group 1 was sampled, and no step": ("lost", record(2, [2], [])),
    "group 0 was taken 2 times": ("twice", record(2, [2], [0, 1])),
    "not those of a step": ("wrong", record(2, [1], [2])),
    "other rewards when": ("wrong", reward_again(1)),
    "sampled again": ("twice", sample_again),
    "tokens of step 2 unaccounted": ("lost", last_row(ledger__unaccounted=3)),
    "ledger/trained falls": ("lost", last_row(ledger__trained=0)),
    "and the store counts 12": ("lost", last_row(ledger__generated=20)),
    "and the calls in the store have": ("wrong", last_row(ledger__trained=6, ledger__masked=6)),
    "has no ledger": (
        "lost",
        edit_lines("metrics.jsonl", lambda row: {k: v for k, v in row.items() if "ledger" not in k}),
    ),
    "trained tokens of -1": ("wrong", change(BATCHES, oldest=-1)),
    "and trained at 9": ("wrong", change(BATCHES, version=9)),
    "step 2 updated version 1, not 0": (
        "wrong",
        edit_lines("metrics.jsonl", lambda row: {**row, "weights/version": row["step"] - 1}),
    ),
    "abc-train-0-0 failed": ("lost", edit_store(f"UPDATE rollouts SET status = 'failed' {OF_ROLLOUT}")),
    "without the reward": ("lost", edit_store(f"DELETE FROM spans {OF_ROLLOUT} AND reward IS NOT NULL")),
    "1 of 2 responses": (
        "lost",
        edit_store(f"DELETE FROM calls {OF_ROLLOUT} AND substr(call_id, 15, 1) = '1'"),
    ),
    "lacks the steps": ("lost", edit_lines("metrics.jsonl", lambda row: row if row["step"] else None)),
    "no summary": ("lost", lambda folder: (folder / "summary.json").unlink()),
    "the agent returned 0.5": ("wrong", edit_lines(LOG, lambda line: {**line, "reward": 0.5})),
    "never returned": ("wrong", edit_lines(LOG, lambda line: None)),
    "the agent raised": ("wrong", edit_lines(LOG, raise_instead)),
    "the agent received": ("wrong", edit_lines(LOG, lambda line: {**line, "answers": ["a", "b"]})),
    "was trained with 0.0": (
        "wrong",
        edit_lines(
            BATCHES,
            lambda line: (
                line | {"rewards": dict.fromkeys(line["rewards"], 0.0)} if "rewards" in line else line
            ),
        ),
    ),
    "not the store's mean": ("wrong", edit_lines("metrics.jsonl", lambda row: {**row, "train/reward": 2.0})),
    "sampled from versions [1], not 6": (
        "wrong",
        edit_lines("metrics.jsonl", lambda row: {**row, "weights/version": row["step"] + 5}),
    ),
    "trained again": ("twice", edit_lines(BATCHES, lambda line: None if "loaded" in line else line)),
    "times in metrics": ("twice", repeat_lines("metrics.jsonl")),
    "ran 2 times": ("twice", repeat_lines(LOG)),
    "attempts that succeeded": (
        "twice",
        edit_store(f"UPDATE attempts SET status = 'succeeded' {OF_ROLLOUT}"),
    ),
    "2 responses for 1 calls": (
        "twice",
        edit_lines(LOG, lambda line: {**line, "answers": line["answers"][:1]}),
    ),
}
"""Damage to the records of a run, by a part of the text of the finding."""


@pytest.mark.parametrize("text", DOCTORED)
def test_each_fault_is_found(folder: Path, text: str) -> None:
    kind, doctor = DOCTORED[text]
    doctor(folder)
    found = findings(folder)
    assert count_findings(found)[kind]
    assert any(finding.kind == kind and text in finding.text for finding in found), found


def test_a_correct_run_has_no_findings(folder: Path) -> None:
    assert findings(folder) == []


def test_a_fault_may_fail_rollouts(folder: Path) -> None:
    DOCTORED["abc-train-0-0 failed"][1](folder)
    assert not [f for f in findings(folder, may_fail=1) if f.kind == "lost"]


def test_masked_tokens_may_be_of_any_age(folder: Path) -> None:
    plan = {"max_staleness": 0, "stale": "mask"}
    assert {f.text for f in findings(folder, **plan)} == {"step 2 trained tokens of 0 at version 1"}
    change(BATCHES, oldest=None)(folder)  # all are masked
    assert findings(folder, **plan) == []


def test_an_attempt_of_a_cancelled_rollout_may_succeed_before_the_next_driver(folder: Path) -> None:
    DOCTORED["attempts that succeeded"][1](folder)
    first = "UPDATE attempts SET worker_id = 'first/runner-0' WHERE sequence_id = 1 AND :name = :name"
    edit_store(first)(folder)
    assert not [f for f in findings(folder, cancels=True) if "attempts that succeeded" in f.text]
    assert [f for f in findings(folder) if "attempts that succeeded" in f.text]
