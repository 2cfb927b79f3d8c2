"""Training states: a run that resumes from one continues as if uninterrupted, with any number of ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "state_ranks.py"
STEPS = 4


def run(ranks: int, folder: Path, kind: str, load: int, updates: int) -> dict:
    """Run ranks that load the state of a step, update, and save."""
    tail = [
        str(ranks),
        str(folder / f"meet-{ranks}-{load}-{updates}"),
        str(folder / "state"),
        kind,
        str(load),
        str(updates),
    ]
    started = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *tail], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    return json.loads(outputs[0].strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        pytest.param(kind, *ranks, marks=pytest.mark.slow)
        for kind in ("full", "lora", "ppo")
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
    for one, other in zip(joined, whole["steps"], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert second["probe"] == pytest.approx(whole["probe"], abs=1e-5)
    assert first["probe"] != pytest.approx(whole["probe"], abs=1e-3)  # it moved meanwhile
