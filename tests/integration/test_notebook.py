"""The notebook runs in a real kernel, in which an event loop is already running."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.framework("nbclient", "ipykernel")
def test_the_notebook_runs(tmp_path: Path, no_processes_left: None, monkeypatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("RAYLIGHT_STEPS", "3")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are cleared before a commit"
    NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 3
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    plain = [output["data"].get("text/plain", "") for output in shown if "data" in output]
    (progress,) = [text for text in plain if "rollout s" in text]  # replaced in place at each step
    assert "3/3" in progress
    assert not [output for output in shown if output["output_type"] == "error"]
    assert os.listdir(summary.parent / "checkpoint")
