"""Tests of what only a GPU shows, and the table of their figures. One command runs them all:

    python tests/gpu                  # or: pytest -n 0 -m gpu tests/gpu

What matters most runs first, and figures are printed as they are known. With `--minutes 8` no test begins
after eight minutes.

Each case of a test has a shape and a device. Those on a GPU have the mark `gpu` and are skipped without one.
The case `tiny` runs the same code on a CPU, among the slow tests.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAM_S = 900
ORDER = ("run", "weight_transfer", "learner", "engine", "state", "update_memory", "plan")
"""Files of tests, those that matter most first."""
STARTED = time.monotonic()
Figure = Callable[[str, float, str], None]
Program = Callable[..., dict[str, Any]]


@functools.cache
def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, default=None, help="begin no test of a GPU after so many minutes"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [place for place, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[place] for place in own), key=lambda item: ORDER.index(item.path.stem[9:]))
    for place, item in zip(own, ordered, strict=True):
        items[place] = item


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"GPUs: {', '.join(gpu_names()) or 'none'}" if config.option.markexpr == "gpu" else None


@pytest.fixture(autouse=True)
def _needs_gpus(request: pytest.FixtureRequest) -> None:
    """Skip a test whose mark `gpu(n)` asks for more GPUs than there are."""
    minutes = request.config.getoption("--minutes")
    if minutes is not None and time.monotonic() > STARTED + 60 * minutes:
        pytest.skip(f"{minutes:g} minutes have passed")
    mark = request.node.get_closest_marker("gpu")
    wanted = (mark.args or (1,))[0] if mark else 0
    if wanted and wanted > len(gpu_names()):
        pytest.skip(f"needs {wanted} GPU(s); this machine has {len(gpu_names())}")


@pytest.fixture
def figure(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Figure:
    """Function that adds a figure (name, value, unit) of the test to the table."""

    def add(name: str, value: float, unit: str) -> None:
        request.node.user_properties.append(
            ("figure", {"test": request.node.name, "name": name, "value": value, "unit": unit})
        )
        with capsys.disabled():
            print(f"\n{request.node.name}  {name}: {value:.5g} {unit}", flush=True)

    return add


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Function that returns the folder of a model with random weights, by its shape's name and a device."""

    @functools.cache
    def build(shape: str, device: str) -> str:
        from gpu_shapes import SHAPES
        from gpu_shapes import build as build_model

        return build_model(SHAPES[shape], tmp_path_factory.mktemp(f"model-{shape}"), device)

    return build


@pytest.fixture
def program() -> Program:
    """Function that runs a program of this folder with a task, and returns the object that it prints last.

    The process returns all memory of the device when it ends.
    """

    def run(name: str, **task: Any) -> dict[str, Any]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }
        if task["device"] == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [sys.executable, str(HERE / name), json.dumps(task)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "figure" and report.when == "call"
    ]
    if not figures:
        return
    terminalreporter.section("figures")
    width = max(len(row["test"]) for row in figures)
    for row in figures:
        terminalreporter.write_line(
            f"{row['test']:<{width}}  {row['name']:<44}  {row['value']:>12.5g} {row['unit']}"
        )
