"""The loop of supervised training with learners that only record what they are asked for."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recording_display import RecordingDisplay
from run_output import metric_rows

import raylight as rl
from raylight.config import CheckpointConfig, LearnerConfig
from raylight.errors import LearnerLostError
from raylight.experience.batches.supervised_batches import Example, LearnedRow, SupervisedData
from raylight.trainer.loops.supervised_loop import SupervisedLoop
from raylight.trainer.output.report import Report
from raylight.trainer.spec.resume import fresh_start, resume_after
from raylight.trainer.spec.settings import SupervisedTraining

CONFIG = {"algorithm": {"name": "SFT", "model": "m"}}


def example(number: int) -> Example:
    return Example(
        str(number), ((LearnedRow(np.array([number, 1, 2], np.int32), np.array([0, 1, 1], np.int8)),),)
    )


DATA = SupervisedData([example(i) for i in range(6)], [example(9)])


class FakeRanks:
    """Learners that remember the examples of each update since their last training state."""

    def __init__(self, losses: list[float], lost_at: int | None = None) -> None:
        self.version = self.restarts = 0
        self.learned: list[list[int]] = []
        self.states: dict[int, tuple[list[list[int]], dict[str, Any]]] = {}
        self.saved: list[str] = []
        self.drain_noticed = SimpleNamespace(is_set=lambda: False)
        self.learner = self
        self._losses, self._lost_at = losses, lost_at

    async def update(self, batch: Any) -> dict[str, float]:
        if self._lost_at == self.version + 1:
            self._lost_at = None
            raise LearnerLostError("killed")
        self.version += 1
        self.learned.append([int(row.token_ids[0]) for row in batch.rows])
        return {"train/loss": 1.0 / self.version}

    async def evaluate(self, batch: Any) -> dict[str, float]:
        return {"loss": 2 * self._losses.pop(0), "count": 2.0}

    async def save(self, folder: str, pinned: Any = None) -> None:
        self.saved.append(folder.rpartition("/")[2])

    async def save_state(self, step: int, metadata: dict[str, Any]) -> None:
        self.states[step] = list(self.learned), metadata

    async def finish_saving(self) -> None:
        pass

    async def recover(self, fault: LearnerLostError) -> Any:
        self.restarts += 1
        step = max(self.states, default=0)
        self.learned = list(self.states[step][0]) if step else []
        self.version = step
        return SimpleNamespace(step=step)


def make_loop(folder: Any, ranks: FakeRanks, start: Any = None, data: Any = DATA, **settings: Any) -> Any:
    algorithm = rl.SFT(
        **{"model": "m", "data": [], "val_data": [1], "batch_size": 2, "n_epochs": 2, "val_every": 2}
        | settings
    )
    training = SupervisedTraining(algorithm, LearnerConfig(), CheckpointConfig(every=2), "", 6, "m")
    run = SimpleNamespace(
        settings=SimpleNamespace(training=training, seed=3), learner=ranks, start=start or fresh_start()
    )
    report = Report(folder, RecordingDisplay(), {}, last_logged_step=None if start is None else start.step)
    return SupervisedLoop(run, data, report, CONFIG)  # type: ignore[arg-type]


async def test_each_step_learns_its_examples_and_validations_choose_the_best(tmp_path):
    ranks = FakeRanks([4.0, 3.0, 1.0, 2.0])
    await make_loop(tmp_path, ranks).run()
    assert [sorted(itertools.chain(*ranks.learned[i : i + 3])) for i in (0, 3)] == [list(range(6))] * 2
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["val/loss"] for row in rows if "val/loss" in row] == [4.0, 3.0, 1.0, 2.0]
    assert rows[-1]["train/epoch"] == 2
    assert rows[-1]["train/learned_tokens"] == 4
    assert ranks.saved == ["best.new", "best.new", "best.new", "checkpoint"]
    assert sorted(ranks.states) == [2, 4, 6]


async def test_lost_learners_repeat_the_steps_since_the_last_state(tmp_path):
    whole, lost = FakeRanks([1.0] * 4), FakeRanks([1.0] * 4, lost_at=4)
    await make_loop(tmp_path / "whole", whole).run()
    await make_loop(tmp_path / "lost", lost).run()
    assert lost.learned == whole.learned
    assert lost.restarts == 1
    assert [row["step"] for row in metric_rows(tmp_path / "lost")] == [0, 1, 2, 3, 4, 5, 6]


async def test_a_resumed_run_continues_with_the_same_batches(tmp_path):
    whole = FakeRanks([4.0, 3.0, 2.0, 1.0])
    await make_loop(tmp_path / "whole", whole).run()
    learned, metadata = whole.states[4]
    start = resume_after("state", 4, json.loads(json.dumps(metadata)), CONFIG, 4)
    resumed = FakeRanks([1.0])
    resumed.version, resumed.learned = 4, list(learned)
    (tmp_path / "again").mkdir()
    await make_loop(tmp_path / "again", resumed, start).run()
    assert resumed.learned == whole.learned
    assert [row["step"] for row in metric_rows(tmp_path / "again")] == [5, 6]


@pytest.mark.parametrize(("held_out", "saved"), [(9, []), (8, ["best.new"])])
async def test_models_are_compared_on_the_same_held_out_examples(tmp_path, held_out, saved):
    whole = FakeRanks([4.0, 1.0, 2.0, 3.0])
    await make_loop(tmp_path, whole).run()
    start = resume_after("state", 4, json.loads(json.dumps(whole.states[4][1])), CONFIG, 4)
    resumed = FakeRanks([1.5])
    resumed.version = 4
    await make_loop(tmp_path, resumed, start, SupervisedData(DATA.train, [example(held_out)])).run()
    assert resumed.saved == [*saved, "checkpoint"]


@pytest.mark.parametrize(("size", "is_noted"), [(2, False), (3, True)])
async def test_a_note_says_that_a_resumed_run_has_other_batches(tmp_path, size, is_noted):
    whole = FakeRanks([4.0, 3.0, 2.0, 1.0])
    await make_loop(tmp_path / "whole", whole).run()
    start = resume_after("state", 2, json.loads(json.dumps(whole.states[2][1])), CONFIG, 2)
    resumed = FakeRanks([1.0] * 3)
    (tmp_path / "again").mkdir()
    loop = make_loop(tmp_path / "again", resumed, start, batch_size=size)
    await loop.run()
    noted = [note for note in loop._report._display.notes if "step 2 had other examples" in note]
    assert bool(noted) == is_noted


async def test_patience_ends_training(tmp_path):
    ranks = FakeRanks([2.0, 3.0, 3.0, 3.0, 3.0])
    await make_loop(tmp_path, ranks, patience=2, val_every=1).run()
    assert metric_rows(tmp_path)[-1]["step"] == 2
    assert ranks.saved[-1] == "checkpoint"


@pytest.mark.parametrize("held_out", [[], [example(9)]])
async def test_without_validation_only_the_training_loss_is_logged(tmp_path, held_out):
    ranks = FakeRanks([1.0])
    data = SupervisedData(DATA.train, held_out)
    await make_loop(tmp_path, ranks, data=data, val_before_train=False, val_every=None).run()
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert not any("val/loss" in row for row in rows)
