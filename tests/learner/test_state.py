"""Training states: a run that resumes from one continues as if uninterrupted, with any number of ranks."""

import resource
from pathlib import Path

import pytest
import state_ranks
import torch
from rank_processes import run_ranks

from raylight.errors import CheckpointError, DiskError
from raylight.learner.state import state_files
from raylight.learner.state.checkpoints import TrainingStates

STEPS = 4


def run(ranks: int, folder: Path, kind: str, load: int, updates: int) -> dict:
    """Run ranks that load the state of a step, update, and save."""
    return run_ranks(state_ranks.main, ranks, str(folder / "state"), kind, load, updates)[0]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        pytest.param(kind, *ranks, marks=pytest.mark.slow)
        for kind in ("full", "lora", "muon", "ppo")
        for ranks in ((1, 2), (2, 1), (2, 2), (2, 3))
    ],
)
def test_a_resumed_run_continues_with_any_number_of_ranks(kind: str, before: int, after: int, tmp_path: Path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(before, tmp_path / "whole", kind, 0, STEPS)
    first = run(before, tmp_path / "parts", kind, 0, 2)
    second = run(after, tmp_path / "parts", kind, 2, STEPS - 2)

    assert second["version"] == STEPS
    joined = first["steps"] + second["steps"]
    assert [step["learner/lr"] for step in joined] == [step["learner/lr"] for step in whole["steps"]]
    if before == after:
        assert (joined, second["probe"]) == (whole["steps"], whole["probe"])
    # Muon computes in bfloat16, and amplifies the rounding of gradients that other ranks sum
    rounding, of_metrics = (5e-3, 1e-4) if kind == "muon" else (1e-5, 1e-5)
    for one, other in zip(joined, whole["steps"], strict=True):
        assert one == pytest.approx(other, rel=of_metrics, abs=of_metrics)
    assert second["probe"] == pytest.approx(whole["probe"], rel=5e-6, abs=rounding)
    assert first["probe"] != pytest.approx(whole["probe"], abs=max(rounding, 1e-3))  # it moved meanwhile


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    run(1, tmp_path, "muon", 0, 1)
    with pytest.raises(CheckpointError, match="resume with optimizer='muon'"):
        run(1, tmp_path, "full", 1, 1)


@pytest.mark.usefixtures("one_rank")
def test_a_disk_that_becomes_full_is_a_disk_error(tmp_path: Path):
    """torch raises another error in place of the disk's."""
    states = TrainingStates(str(tmp_path / "state"))
    content = states.new_content(1)
    state_files.write({"a": torch.ones(100)}, content)
    states.complete(1, {}, content)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(DiskError, match="File too large"), states.writing(2):
            state_files.write({"a": torch.ones(1_000_000)}, states.new_content(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert states.steps() == [1]
    read = torch.zeros(100)
    with states.reading(1) as content:
        state_files.StateReader(content).read({"a": read})
    assert read.sum() == 100


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_damaged_state_is_named(file: str, tmp_path: Path):
    states = TrainingStates(str(tmp_path / "state"))
    content = states.new_content(1)
    state_files.write({"a": torch.ones(100_000)}, content)
    states.complete(1, {}, content)
    damaged = Path(content, file)
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with states.reading(1) as url, pytest.raises(CheckpointError, match=r"step-1/.* is damaged: a file is"):
        state_files.StateReader(url).read({"a": torch.zeros(100_000)})
