"""Supervised training on a real cluster: the run's files, a killed learner, and a resumed run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from run_output import metric_rows
from safetensors.numpy import load_file

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, question
from raylight.trainer.loops.supervised_loop import SupervisedLoop
from raylight.trainer.spec.run_file import load_run_file

TRAIN, VAL = additions(0)
STEPS = 4


def write(file: Path, tasks: list[dict[str, int]]) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": question(task)},
                {"role": "assistant", "content": str(task["a"] + task["b"])},
            ]
        }
        for task in tasks
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    train, val = write(tmp_path / "train.jsonl", TRAIN[:32]), write(tmp_path / "val.jsonl", VAL[:16])
    return {"model": STARTER_MODEL, "data": str(train), "val_data": str(val), "lr": 1e-4, "batch_size": 16}


def fit(folder: Path, files: dict[str, Any], resume: Any = False, **settings: Any) -> dict[str, Any]:
    algorithm = rl.SFT(**files | {"n_epochs": 2, "val_every": 2} | settings)
    return rl.Trainer(algorithm=algorithm, output_dir=folder, checkpoint={"every": 1}, progress=False).fit(
        resume=resume
    )


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoint" / "model.safetensors")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_run_that_lost_its_learners_or_its_driver_has_the_same_weights(
    cluster: Any, tmp_path: Path, files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = fit(tmp_path / "whole", files)
    assert summary["steps"] == STEPS
    assert summary["best"]["metric"] == "val/loss"
    metrics = metric_rows(tmp_path / "whole")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert metrics[-1]["val/loss"] < metrics[0]["val/loss"]
    assert metrics[-1]["train/epoch"] == 2
    assert metrics[1]["train/examples"] == 16
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "whole" / "checkpoint" / name).is_file()
    written = load_run_file(tmp_path / "whole" / "config.yaml")
    assert rl.Trainer(**written.trainer_arguments()).algorithm == rl.SFT(**files, n_epochs=2, val_every=2)
    assert yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["run"]["total_steps"] == STEPS

    killed = []
    learn = SupervisedLoop._learn

    async def kill_then_learn(self: SupervisedLoop, step: int) -> Any:
        if step == 3 and not killed:
            killed.append(step)
            self._learner.learner.stop()
        return await learn(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLoop, "_learn", kill_then_learn)
        fit(tmp_path / "killed", files)
    assert killed
    assert metric_rows(tmp_path / "killed")[-1]["learner/restarts"] == 1

    class Interrupted(Exception):
        pass

    async def stop_at_3(self: SupervisedLoop, step: int) -> Any:
        if step == 3:
            raise Interrupted
        return await learn(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLoop, "_learn", stop_at_3)
        with pytest.raises(Interrupted):
            fit(tmp_path / "resumed", files)
    fit(tmp_path / "resumed", files, resume="auto")
    assert [row["step"] for row in metric_rows(tmp_path / "resumed")] == [0, 1, 2, 3, 4]

    expected = weights(tmp_path / "whole")
    for name in ("killed", "resumed"):
        found = weights(tmp_path / name)
        assert all(np.array_equal(found[key], expected[key]) for key in expected), name
    cluster.assert_clean()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_patience_ends_a_run_with_an_adapter_on_two_ranks(
    cluster: Any, tmp_path: Path, files: dict[str, Any]
) -> None:
    algorithm = rl.SFT(**files, n_epochs=20, val_every=1, patience=2, min_delta=10.0, lr_schedule="cosine")
    trainer = rl.Trainer(
        algorithm=algorithm, output_dir=tmp_path / "run", n_learners=2, learner={"lora": {"rank": 4}}
    )
    summary = trainer.fit()
    assert summary["steps"] == 2
    assert (tmp_path / "run" / "checkpoint" / "adapter" / "adapter_config.json").is_file()
    assert (tmp_path / "run" / "best" / "best.json").is_file()
    cluster.assert_clean()
