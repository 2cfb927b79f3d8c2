"""Modules of the examples that people copy, imported as the examples' own programs import them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from programs import run_python
from run_output import metric_rows

from raylight.cli.examples import copy_example, example_folders


def example_module(example: str, module: str) -> ModuleType:
    """Import a module from an example's folder. No other module sees it or its siblings under their names."""
    folder = example_folders()[example]
    names = {path.stem for path in folder.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(folder))
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(kept)


def run_copy(example: str, parent: Path, *arguments: str) -> None:
    """Copy an example, and run its `train.py` there, outside of the checkout and on its own Ray cluster."""
    copy = copy_example(example, parent / "mine")
    run_python(copy / "train.py", *arguments, cwd=parent, timeout_s=1700)


def train_three_steps(example: str, parent: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run three steps of an example's copy, with `parent / "out"` as output folder; return their metrics."""
    output = parent / "out"
    run_copy(example, parent, "--steps", "3", "--cpu", "--output-dir", str(output), *arguments)
    steps = updates(output)
    assert len(steps) == 3
    return steps


def updates(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's updates; the engine's log-probs were the learner's in each."""
    updated = [step for step in metric_rows(output) if "learner/grad_norm" in step]
    assert all(step["mismatch/logprob_abs_max"] < 1e-3 for step in updated)
    return updated
