"""Resume after a kill of the driver or the learners: nothing is trained twice, nothing finished is lost."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from image_helpers import make_image
from ray_cluster import eventually
from tiny_vlms import build_vlm

from raylight.experience.batches.token_records import TokenRecords
from raylight.learner.state.checkpoints import TrainingStates
from raylight.quickstart.additions import additions
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import DRAW, Rollout, StepGroups

SCRIPT = Path(__file__).parent / "resumed_run.py"
STEPS = 8
ROLLOUTS = 32


def start_run(
    folder: Path, learners: int = 1, resume: str = "auto", kind: str = "full", steps: int = STEPS
) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("a") as log:
        command = [sys.executable, str(SCRIPT), str(folder), str(steps), str(learners), resume, kind]
        env = {**os.environ, "RAY_ADDRESS": "local"}
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def read_metrics(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def wait_for_step(run: subprocess.Popen, folder: Path, step: int) -> None:
    def reached() -> bool:
        assert run.poll() is None, (folder / "log").read_text()
        return any(row["step"] >= step for row in read_metrics(folder))

    eventually(reached, 240, f"step {step}")


def read_rollouts(folder: Path) -> list[tuple[str, str, int, float]]:
    """Return name, status, number of attempts and end time of the training rollouts."""
    with sqlite3.connect(f"file:{folder}/store.db?mode=ro", uri=True) as db:
        return db.execute(
            "SELECT rollout_id, status, n_attempts, end_time FROM rollouts WHERE mode = 'train'"
        ).fetchall()


def finish(run: subprocess.Popen, folder: Path) -> dict:
    assert run.wait(300) == 0, (folder / "log").read_text()
    return json.loads((folder / "summary.json").read_text())


def learner_processes(run: subprocess.Popen) -> list[psutil.Process]:
    inside = psutil.Process(run.pid).children(recursive=True)
    return [process for process in inside if "LearnerActor" in " ".join(process.cmdline()[:1])]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_resumes_after_its_driver_was_killed(tmp_path: Path, kill_leftover_proxies: None) -> None:
    run = start_run(tmp_path)
    wait_for_step(run, tmp_path, 5)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = {name: end for name, status, _, end in read_rollouts(tmp_path) if status == "succeeded"}
    assert len(before) >= 5 * ROLLOUTS
    rewards = {row["step"]: row["train/reward"] for row in read_metrics(tmp_path) if "train/reward" in row}

    summary = finish(start_run(tmp_path, learners=2), tmp_path)
    after = read_rollouts(tmp_path)
    assert len(after) == STEPS * ROLLOUTS  # as many as without the kill: no finished rollout was repeated
    assert {
        name: end for name, _, _, end in after if name in before
    } == before  # finished rollouts were reused unchanged
    assert {status for _, status, _, _ in after} == {"succeeded"}
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert {row["step"]: row["train/reward"] for row in rows if row["step"] in rewards} == rewards
    versions = [row["weights/version"] for row in rows if "weights/version" in row]
    assert versions == sorted(set(versions))
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in rows if "mismatch/logprob_abs_max" in row)
    assert summary["steps"] == STEPS
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-6", "step-8"]
    assert (tmp_path / "checkpoint" / "config.json").exists()

    again = finish(start_run(tmp_path, resume="yes"), tmp_path)  # the run is finished: nothing is left to do
    assert (again["steps"], len(read_rollouts(tmp_path))) == (STEPS, STEPS * ROLLOUTS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_with_images_resumes(tmp_path: Path, kill_leftover_proxies: None) -> None:
    """The state is from step 2, so that step 3 is taken again, with the images in the store's folder."""
    images = [make_image(color) for color in ("red", "blue", "green")]
    (tmp_path / "images.json").write_text(json.dumps([image.data_url for image in images]))
    build_vlm("qwen3_vl", tmp_path / "model")
    run = start_run(tmp_path, kind="images", steps=4)
    wait_for_step(run, tmp_path, 3)
    run.send_signal(signal.SIGKILL)
    run.wait()
    killed = {row["step"]: row for row in read_metrics(tmp_path)}
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "store-images").iterdir()}
    assert {path.name for path in stored} == {image.sha256 for image in images}

    summary = finish(start_run(tmp_path, kind="images", steps=4), tmp_path)
    rows = read_metrics(tmp_path)
    assert (summary["steps"], [row["step"] for row in rows]) == (4, [1, 2, 3, 4])
    for name in ("train/reward", "learner/grad_norm", "mismatch/logprob_abs_max"):
        assert rows[2][name] == pytest.approx(killed[3][name], rel=1e-3, abs=1e-6)
    assert all(row["mismatch/logprob_abs_max"] < 1e-5 for row in rows)
    assert all(row["learner/grad_norm"] > 0 for row in rows)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store-images").iterdir()} == stored


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_a_run_continues_after_a_learner_was_killed(
    trained: str, tmp_path: Path, no_processes_left: None
) -> None:
    run = start_run(tmp_path, learners=2, resume="no", kind=trained)
    wait_for_step(run, tmp_path, 4)
    learner_processes(run)[-1].kill()
    summary = finish(run, tmp_path)
    assert summary["steps"] == STEPS
    assert summary["counts"]["learner_restarts"] == 1
    after = read_rollouts(tmp_path)
    assert len(after) == STEPS * ROLLOUTS
    assert {attempts for _, _, attempts, _ in after} == {1}
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[-1]["learner/restarts"] == 1
    assert (tmp_path / "checkpoint" / "adapter").exists() == (trained == "lora")
    versions = [row["weights/version"] for row in rows if "weights/version" in row]
    assert versions == sorted(set(versions))


# an asynchronous run on another number of learners


class Attempted(NamedTuple):
    """An attempt, as the store has it and as the agent logged it."""

    sampled: int
    logged: int | None
    reward: float | None


class Stored(NamedTuple):
    """Contents of a run's store."""

    rollouts: dict[str, Rollout]
    attempts: dict[str, list[Attempted]]
    """Attempts of each rollout, oldest first."""
    steps: dict[int, StepGroups]
    lineage: str

    def group(self, number: int) -> list[str]:
        """Return the names of the rollouts of a group."""
        return [name for name in self.rollouts if name.startswith(f"{self.lineage}-train-{number}-")]

    def decided(self) -> dict[str, list[Attempted]]:
        """Return the attempts of the rollouts that steps took or dropped."""
        taken = [name for step in self.steps.values() for group in step.all for name in self.group(group)]
        assert max(Counter(taken).values()) == 1, "a group is taken by one step"
        return {name: self.attempts[name] for name in taken}


def read_store(folder: Path) -> Stored:
    lines = [json.loads(line) for line in (folder / "agent.jsonl").read_text().splitlines()]
    logged = {attempt: (tokens, reward) for attempt, tokens, reward in lines}
    assert len(logged) == len(lines), "an attempt runs once"
    attempts: dict[str, list[Attempted]] = {}
    with sqlite3.connect(f"file:{folder}/store.db?mode=ro", uri=True) as db:
        rows = db.execute(
            "SELECT rollout_id, attempt_id, COALESCE(tokens + late, 0) FROM attempts"
            " LEFT JOIN sampled USING (rollout_id, attempt_id) ORDER BY sequence_id"
        )
        for rollout, attempt, sampled in rows:
            found = Attempted(sampled, *logged.get(attempt, (None, None)))
            attempts.setdefault(rollout, []).append(found)

    async def read() -> Stored:
        service = StoreService(folder / "store.db", read_only=True)
        try:
            store = StoreClient(service)
            rollouts = {item.rollout_id: item for item in await store.query_rollouts()}
            (lineage,) = {name.rsplit("-train-", 1)[0] for name in rollouts}
            return Stored(rollouts, attempts, await store.query_steps(lineage), lineage)
        finally:
            await service.close()

    return asyncio.run(read())


def check_ledger(folder: Path, stored: Stored, tokens: dict[str, int]) -> None:
    """Count each sampled token a second time, and compare the sums."""
    trained: Counter[str] = Counter()
    for step in stored.steps:
        rows = TokenRecords(folder).read(step, stored.rollouts)
        found = {name: sum(len(row.advantages) for row in own) for name, own in rows.items() if own}
        groups = {name.rsplit("-", 1)[0].rsplit("-", 1)[1] for name in found}
        assert groups <= {str(group) for group in stored.steps[step].trained}
        assert not trained.keys() & found.keys(), "a rollout is trained by one step"
        trained.update(found)
    dropped = {
        name for step in stored.steps.values() for group in step.dropped for name in stored.group(group)
    }
    decided = stored.decided()
    fates: Counter[str] = Counter()
    for name, attempts in decided.items():
        *earlier, last = attempts
        assert last.sampled == last.logged, "the store has what the response counted"
        fates["failed"] += sum(attempt.sampled for attempt in earlier)
        if name in dropped:
            fates["dropped"] += last.sampled
        elif last.reward is None:
            fates["failed"] += last.sampled
        else:
            assert trained[name] in (0, last.sampled)
            fates["trained"] += trained[name]
            fates["masked"] += last.sampled - trained[name]
    everything = sum(attempt.sampled for own in stored.attempts.values() for attempt in own)
    assert fates["trained"] == trained.total()
    assert {name: tokens[name] for name in ("trained", "masked", "dropped", "failed")} == {
        name: fates[name] for name in ("trained", "masked", "dropped", "failed")
    }
    assert tokens["generated"] == everything == fates.total() + tokens["open"]
    assert tokens["unaccounted"] == 0
    assert min(fates["trained"], fates["failed"], fates["dropped"]) > 0


def check_curriculum(folder: Path, stored: Stored) -> None:
    """Sort the tasks by the outcomes of their groups, step by step, and compare with the saved pools."""
    tasks = additions(0)[0][:40]
    expected = dict.fromkeys(range(len(tasks)), "untested")
    for _, step in sorted(stored.steps.items()):
        for group in step.trained:
            names = stored.group(group)
            inputs = [stored.rollouts[name].input for name in names]
            task = tasks.index(inputs[0])
            assert inputs == [tasks[task]] * len(names), "a group has one task"
            assert stored.rollouts[names[0]].metadata[DRAW] == {"task": task}
            rewards = [reward for name in names if (reward := stored.attempts[name][-1].reward) is not None]
            if rewards:
                mean = statistics.fmean(rewards)
                expected[task] = "solved" if mean >= 0.9 else "unsolved" if mean <= 0.1 else "learnable"
    pools = TrainingStates(str(folder / "state")).metadata(STEPS)["tasks"]["pools"]
    assert {task: pool for pool, members in pools.items() for task in members} == expected
    assert len({*expected.values()}) > 1


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_an_asynchronous_run_resumes_on_other_ranks(
    before: int,
    after: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kill_leftover_proxies: None,
) -> None:
    """The state is from step 3, so that steps 4 and 5 are taken again."""
    monkeypatch.setenv("RESUMED_RUN_FOLDER", str(tmp_path))
    run = start_run(tmp_path, before, kind="asynchronous")
    wait_for_step(run, tmp_path, 5)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert TrainingStates(str(tmp_path / "state")).steps()[-1] == 3
    shutil.copytree(tmp_path / "tokens", tmp_path / "killed" / "tokens")
    killed = {row["step"]: row for row in read_metrics(tmp_path)}

    summary = finish(start_run(tmp_path, after, kind="asynchronous"), tmp_path)
    rows, stored = read_metrics(tmp_path), read_store(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) == [*stored.steps]
    versions = [row["weights/version"] for row in rows if "weights/version" in row]
    assert versions == list(range(1, len(versions) + 1))  # a step may have no signal
    for row in rows[:3]:
        assert row == killed[row["step"]]
    for row in rows[3:5]:  # the same rollouts, by other ranks
        before_kill = killed[row["step"]]
        norm = before_kill.get("learner/grad_norm")
        assert row.get("learner/grad_norm") == pytest.approx(norm, rel=1e-3)
        for name in ("train/reward", "ledger/trained", "ledger/dropped", "ledger/failed"):
            assert row[name] == before_kill[name]
    assert max(row["async/staleness_max"] for row in rows) == 1
    assert max(row.get("mismatch/logprob_abs_max", 0.0) for row in rows) < 1e-3
    assert max(row.get("mismatch/stale_logprob_abs_mean", 0.0) for row in rows) > 1e-2, "updates show"
    compared = 0
    for step in (4, 5):  # taken again by the other ranks, from the state of step 3
        own, again = TokenRecords(tmp_path / "killed"), TokenRecords(tmp_path)
        first, second = own.read(step, stored.rollouts), again.read(step, stored.rollouts)
        for name, records in first.items():
            for one, other in zip(records, second[name], strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
                np.testing.assert_allclose(one.advantages, other.advantages, atol=1e-5)
                compared += 1
    assert compared > 0
    check_ledger(tmp_path, stored, summary["tokens"])
    check_curriculum(tmp_path, stored)
