"""Contents of a run's directory: cards, settings, metrics that grow, and its status."""

import fcntl
import json
import os
from pathlib import Path

import pytest
import yaml
from recorded_run import SECRET, record_run, write_metrics

from raylight._utils.bounds import ENDLESS
from raylight.errors import ConfigError
from raylight.experience.trajectories.staleness import StaleMask
from raylight.ui import run_folder
from raylight.ui.run_folder import MetricTable, RunFolder, ShownRun, find_runs, name_runs


async def test_card_and_details(tmp_path: Path) -> None:
    await record_run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run", "run")
    card = folder.card()
    assert (card["kind"], card["algorithm"], card["step"], card["total_steps"]) == ("training", "GRPO", 2, 3)
    assert (card["train_reward"], card["val_reward"]) == ([0.5, 0.75], [0.25, 0.25])
    assert card["spark"] == [0.5, 0.75]
    details = folder.details()
    assert details["tokens"] == {"generated": 20}
    assert details["settings"]["algorithm.lr"] == 0.1
    assert SECRET not in json.dumps(details)


async def test_settings_of_verl_are_those_that_its_configuration_resolves_to(tmp_path: Path) -> None:
    recorded = await record_run(tmp_path / "run")
    content = yaml.safe_load((recorded.folder / "config.yaml").read_text())
    content["run"]["algorithm"] = content["algorithm"] | {"name": "VERL", "max_staleness": 2}
    content["algorithm"] = {
        "name": "VERL",
        "config": {"algorithm": {"adv_estimator": "grpo"}},
        "strict": True,
    }
    (recorded.folder / "config.yaml").write_text(yaml.safe_dump(content))
    folder = RunFolder(recorded.folder, "run")
    card = folder.card()
    assert (card["algorithm"], card["model"]) == ("VERL", str(recorded.folder / "model"))
    assert ShownRun(folder).stale_mask(2) == StaleMask(1, 2)


@pytest.mark.parametrize("locks", [run_folder.LOCKS, Path("/no/proc/locks")], ids=["Linux", "other systems"])
async def test_status(locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCKS", locks)
    recorded = await record_run(tmp_path / "run")
    folder = RunFolder(recorded.folder, "run")
    for file in recorded.folder.iterdir():
        os.utime(file, (0, 0))
    assert folder.status() == "stopped"
    with (recorded.folder / "store.db-lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.status() == "running"
    (recorded.folder / "summary.json").write_text("{}")
    assert folder.status() == "finished"


def test_metrics_are_read_as_they_grow(tmp_path: Path) -> None:
    table = MetricTable(tmp_path / "metrics.jsonl")
    assert table.refresh() == 0
    write_metrics(tmp_path, [{"step": 1, "a": 1.0, "b": None}])
    assert table.refresh() == 0
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a": 2.0')  # a line that is being written
        file.flush()
        assert table.refresh() == 1
        assert len(table.rows) == 1
        file.write(', "val/step": 1}\n')
    assert table.refresh() == 1
    assert table.columns() == {
        "step": [1, 2],
        "val/step": [None, 1],
        "a": [1.0, 2.0],
        "b": [None, None],
    }
    assert table.columns(["a"], start=1) == {"step": [2], "val/step": [1], "a": [2.0]}


def test_metrics_that_a_resumed_run_wrote_again_are_read_from_the_start(tmp_path: Path) -> None:
    table = MetricTable(tmp_path / "metrics.jsonl")
    write_metrics(tmp_path, [{"step": step} for step in range(5)])
    table.refresh()
    (tmp_path / "new").write_text('{"step": 0}\n')
    os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    table.refresh()
    assert [row["step"] for row in table.rows] == [0]


async def test_find_runs_in_folders(tmp_path: Path) -> None:
    for name in ("a", "b/a", "c/run"):
        await record_run(tmp_path / name)
    found = find_runs([tmp_path, tmp_path / "b", tmp_path / "a", tmp_path / "c", tmp_path / "none"])
    assert {*found} == {tmp_path / name for name in ("a", "b/a", "c/run")}
    with pytest.raises(ConfigError, match="is not a run"):
        RunFolder(tmp_path, "x")


def test_names_of_runs_stay_as_they_are() -> None:
    names = {Path("/first/run"): "run"}
    name_runs([Path("/x/a/run"), Path("/first/run"), Path("/x/b/run"), Path("/y/b/run"), Path("/z")], names)
    assert names[Path("/first/run")] == "run"
    assert names[Path("/x/a/run")] == "a~run"
    assert names[Path("/x/b/run")] == "b~run"
    assert names[Path("/y/b/run")].startswith("run~")
    assert names[Path("/z")] == "z"
    assert len({*names.values()}) == 5


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    """NaN is written by trackers and losses; the other lines by full disks and by hand."""
    folder = tmp_path / os.fsdecode(b"r\xff")
    folder.mkdir()
    (folder / "config.yaml").write_bytes(b"run: 3\nagent: \xff\n")
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "train/reward": null, "ledger/generated": null, "time/total_s": NaN}\n'
        '\nnothing\n[1]\n{"train/reward": 1}\n{"step": NaN}\n{"step": 2, "train/reward": "high"}\n{"step": 3'
    )
    (folder / "summary.json").write_text("[]")
    run = RunFolder(folder, "x")
    details = run.details()
    assert [row["step"] for row in run.metrics.rows] == [1, 2]
    assert details["tokens"] == {}
    details["path"].encode()
    (folder / "config.yaml").write_text("agent: mine\nrun: {total_steps: 5}\n")
    assert run.details()["total_steps"] == 5
    (folder / "config.yaml").write_text(f"agent: mine\nrun: {{total_steps: {ENDLESS}}}\n")
    assert (run.details()["kind"], run.details()["total_steps"]) == ("training", None)
    os.utime(folder / "config.yaml", (1, 1))
    (folder / "config.yaml").write_text("agent: [")
    assert run.details()["agent"] == "mine"


@pytest.mark.parametrize("content", ["", "- a\n", "agent: x\nengine: null\nalgorithm: null\nrun: null\n"])
def test_unusual_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    assert RunFolder(tmp_path, "x").details()["kind"] == "other"
