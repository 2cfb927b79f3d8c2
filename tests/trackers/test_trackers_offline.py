"""A real run with all trackers, offline: each tracker's own content equals metrics.jsonl."""

import importlib.util
import math
import os
from pathlib import Path

import pytest
from programs import run_python
from run_output import metric_rows
from tracker_readers import READERS, RENAMED

HERE = Path(__file__).parent
MISSING = [name for name in READERS if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(MISSING) and "RAYLIGHT_REQUIRE_TRACKERS" not in os.environ,
        reason=f"not installed: {', '.join(MISSING)}; pip install 'raylight[trackers]'",
    ),
]
STEPS = 3


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that all trackers received, and one that always fails."""
    folder = tmp_path_factory.mktemp("outputs")
    loggers = [*READERS, "failing_tracker:FailingTracker"]
    options = [f"--output-dir={folder / 'run'}", f"--steps={STEPS}", "--engine=transformers"]
    offline = {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    }
    command = ["-m", "raylight.cli", "quickstart", *options, *(f"--logger={name}" for name in loggers)]
    done = run_python(*command, timeout_s=380, **offline)
    output = done.stdout + done.stderr
    flat = " ".join(output.split())
    assert flat.count("metric logger FailingTracker failed in log(), and the run continues") == 1, output
    assert f"FailingTracker recorded 0 of {STEPS + 1} rows" in flat, output
    assert "Tracker failed" not in flat.replace("FailingTracker failed", ""), output
    return folder


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_the_metrics_of_the_run(name: str, outputs: Path) -> None:
    rows = metric_rows(outputs / "run")
    renamed = RENAMED.get(name, str)
    expected: dict[str, dict[int, float]] = {}
    for row in rows:
        for metric, value in row.items():
            if metric != "step" and value is not None and math.isfinite(value):
                expected.setdefault(renamed(metric), {})[row["step"]] = value
    recorded = READERS[name](outputs)
    assert recorded.values.keys() == expected.keys()
    for metric, values in expected.items():
        assert recorded.values[metric] == pytest.approx(values, rel=1e-5), metric
    assert recorded.tables == {row["step"] for row in rows if "val/reward" in row}
