"""The small_gpu example with the starter model on a CPU: training, benchmark, one trace."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_output import metric_rows

from raylight.quickstart import STARTER_MODEL

pytestmark = pytest.mark.usefixtures("no_processes_left")

ROOT = Path(__file__).parents[2]
ADDITIONS = ("--model", STARTER_MODEL, "--data", "additions", "--prompt", "plain", "--max-new-tokens", "8")


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    command = [sys.executable, f"examples/small_gpu/{script}", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def digest(folder: str | Path) -> str:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a short training run."""
    folder = tmp_path_factory.mktemp("small") / "run"
    done = run("train.py", "--cpu", "--steps", "8", "--val-every", "4", "--output-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run needs" in done.stdout
    return folder


@pytest.mark.slow
def test_training_learns_and_leaves_an_adapter(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["reward_before"] < 0.72  # half of the answers are correct; a wrong number earns 0.1
    assert summary["reward_after"] > summary["reward_before"] + 0.1
    rows = metric_rows(trained)
    assert [row["step"] for row in rows if "val/reward" in row] == [0, 4, 8]
    assert sorted(path.name for path in (trained / "state").iterdir()) == ["step-4", "step-8"]
    for folder in (trained / "checkpoint" / "adapter", trained / "best" / "adapter"):
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
        assert (folder / "adapter_model.safetensors").stat().st_size > 0


@pytest.mark.slow
def test_the_benchmark_scores_the_adapter_and_changes_nothing(trained: Path, tmp_path: Path) -> None:
    before = digest(STARTER_MODEL), digest(trained)
    correct = {}
    for name, extra in (
        ("base", ()),
        ("adapter", ("--lora-adapter", str(trained / "checkpoint" / "adapter"))),
    ):
        done = run("benchmark.py", *ADDITIONS, *extra, "--samples", "2", "--output-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stdout + done.stderr
        figures = json.loads((tmp_path / name / "eval.json").read_text())
        assert (figures["tasks"], figures["rollouts"], figures["failed"], figures["notes"]) == (
            128,
            256,
            0,
            [],
        )
        correct[name] = figures["rewards"]["correct"]["mean"]
        lines = [json.loads(line) for line in (tmp_path / name / "eval.jsonl").read_text().splitlines()]
        assert all(
            (line["rewards"]["correct"] == 1.0) == (line["text"].strip() == str(line["task"]["answer"]))
            for line in lines
        )
    assert 0.35 < correct["base"] < 0.65
    assert correct["adapter"] > correct["base"] + 0.1
    assert (digest(STARTER_MODEL), digest(trained)) == before


@pytest.mark.slow
def test_one_question_is_shown_with_its_trace(tmp_path: Path) -> None:
    done = run("benchmark.py", *ADDITIONS, "--limit", "1", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    command = [sys.executable, "-m", "raylight.cli", "trace", str(tmp_path), "--full"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.count("=== ") == 1
    for part in (": succeeded\ntask: {", "openai.chat.completion", "agentlightning.message", "reward: "):
        assert part in shown
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        pytest.param(
            "train.py",
            ("--memory-gb", "0.001"),
            "DeviceMemoryError",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "train.py",
            ("--model", "/no/such/model"),
            "ModelNotFoundError: there is no model folder /no/such/model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "benchmark.py",
            (*ADDITIONS, "--lora-adapter", "/no/such"),
            "ModelNotFoundError: there is no adapter folder",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "benchmark.py",
            ("--model", STARTER_MODEL, "--data", "/no/such.jsonl"),
            "DatasetError: there is no file",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_arguments_end_with_one_message(
    script: str, args: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = run(script, *args, "--output-dir", str(tmp_path))
    assert done.returncode == 1
    assert message in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
