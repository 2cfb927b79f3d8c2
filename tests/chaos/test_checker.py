"""The checker finds each kind of fault in the records of a run, and none in a correct run."""

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_checker import check, count_findings, read_evidence
from chaos_log import BATCHES, LOG, reward_of
from store_helpers import LOST, Box, ids_of, open_box, span_of
from store_helpers import reward_of as reward_span
from unit_helpers import make_generation

from raylight.semconv import CALL_ID, OUTPUT_MESSAGES
from raylight.types import CallKey, EnqueueRolloutRequest

STEPS, GROUP = 2, 2
ROLLOUTS = [f"abc-train-{number}-{sample}" for number in range(STEPS) for sample in range(GROUP)]


def append(file: Path, line: dict) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


async def add_rollout(box: Box, folder: Path, name: str, version: int) -> float:
    """Execute a rollout: an attempt that is lost, and one with two calls; return the reward."""
    await box.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, mode="train", rollout_id=name)])
    lost = await box.again()
    append(folder / LOG, {"rollout": name, "attempt": ids_of(lost)[1], "answers": [], "raised": "gone"})
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
    line = {"rollout": name, "attempt": ids_of(rollout)[1], "answers": answers, "reward": reward}
    append(folder / LOG, line)
    await box.store.add_span(reward_span(rollout, reward))
    await box.store.finish_attempt(rollout, "succeeded")
    return reward


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Return the folder of a correct run of two steps, whose learners were restarted once."""
    append(tmp_path / "metrics.jsonl", {"step": 0})
    async with open_box(tmp_path / "store.db") as box:
        for step in range(1, STEPS + 1):
            names = [name for name in ROLLOUTS if f"train-{step - 1}-" in name]
            rewards = {name: await add_rollout(box, tmp_path, name, step - 1) for name in names}
            append(tmp_path / BATCHES, {"rewards": rewards, "driver": 1})
            append(tmp_path / BATCHES, {"loaded": step - 1, "driver": 1})
            append(tmp_path / BATCHES, {"rewards": rewards, "driver": 1})
            mean = sum(rewards.values()) / len(rewards)
            append(tmp_path / "metrics.jsonl", {"step": step, "train/reward": mean, "weights/version": step})
    summary = {"steps": STEPS, "rollouts": len(ROLLOUTS), "rollouts_failed": 0, "rollouts_lost": 0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def findings(folder: Path, may_fail: int = 0) -> list:
    return check(read_evidence(folder, folder, STEPS, GROUP, may_fail))


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


def raise_instead(line: dict) -> dict:
    line.pop("reward", None)
    return {**line, "raised": "gone"}


OF_ROLLOUT = "WHERE rollout_id = :name"
DOCTORED: dict[str, tuple[str, Doctor]] = {
    "1 of 2 rollouts": ("lost", edit_store(f"DELETE FROM rollouts {OF_ROLLOUT}")),
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
        edit_lines(BATCHES, lambda line: {**line, "rewards": dict.fromkeys(line.get("rewards", ()), 0.0)}),
    ),
    "not the store's mean": ("wrong", edit_lines("metrics.jsonl", lambda row: {**row, "train/reward": 2.0})),
    "sampled from versions": (
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
