"""The board of Grafana, and the page that lists the metrics."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from raylight.ray_metrics.table import BOARD, METRICS, reference
from raylight.types.rollouts import FailureKind

CONTENT = json.loads(BOARD.read_text())
PANELS = CONTENT["panels"]
SERIES = {"histogram": ("_bucket", "_sum", "_count")}
EXPOSED = {f"ray_{spec.name}{suffix}" for spec in METRICS.values() for suffix in SERIES.get(spec.kind, ("",))}
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "observability.md"


def test_the_file_is_what_its_script_generates() -> None:
    script = (ROOT / "scripts" / "generate_board.py").read_text()
    names = {"__name__": "generate_board"}
    exec(compile(script, "generate_board.py", "exec"), names)
    assert names["board"]() == BOARD.read_text(), "write it again: python scripts/generate_board.py"  # type: ignore[operator]


def test_its_rows() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Training", "Rollouts", "Engines", "Learners", "Weights"]


@pytest.mark.parametrize(
    "panel", [panel for panel in PANELS if panel["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_a_panel_shows_known_metrics_of_the_chosen_runs(panel: dict) -> None:  # type: ignore[type-arg]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert "{{run}}" in target["legendFormat"]
        assert 'run=~"$run"' in target["expr"]
        names = re.findall(r"ray_\w+", target["expr"])
        assert names
        assert set(names) <= EXPOSED


def test_every_kind_of_failure_is_counted() -> None:
    counted = {labels["kind"] for labels in METRICS["raylight_failed_rollouts"].rows.values()}
    assert counted == set(get_args(FailureKind))


def test_its_variables_choose_session_and_run() -> None:
    variables = {each["name"]: each for each in CONTENT["templating"]["list"]}
    assert set(variables) == {"datasource", "SessionName", "run"}
    names = re.findall(r"ray_\w+", variables["run"]["definition"])
    assert names
    assert set(names) <= EXPOSED


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))


def test_the_page_lists_every_metric() -> None:
    assert reference() in PAGE.read_text(), "write it again: python docs/generate_metrics.py"
