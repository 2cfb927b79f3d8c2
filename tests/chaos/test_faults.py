"""Runs under faults: every run ends only when it should, and loses, falsifies or repeats nothing."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from chaos_experiment import Experiment
from chaos_runs import RUNS, ChaosRun
from chaos_table import rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each run, or of each fault."""
    runs = list(RUNS.values())
    if metafunc.config.getoption("--alone"):
        runs = [alone for run in runs for alone in run.alone()]
    metafunc.parametrize("run", runs, ids=[run.name for run in runs])


@pytest.mark.slow(parts=4 * len(RUNS))
@pytest.mark.timeout(1800)
def test_run(
    run: ChaosRun,
    tmp_path: Path,
    record_property: Any,
    capsys: pytest.CaptureFixture,
    pytestconfig: pytest.Config,
) -> None:
    actions = {fault.action for fault in run.faults}
    if actions & {"fill the disk", "break the disk"} and os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if run.breaks_disk and not (shutil.which("mkfs.ext4") and os.path.exists("/dev/loop-control")):
        pytest.skip("a disk that can fail needs ext4 and loop devices")
    if any(fault.clock_s for fault in run.faults) and shutil.which("cc") is None:
        pytest.skip("a clock that can be set needs a C compiler")
    result = Experiment(run.with_seed(pytestconfig.getoption("--chaos-seed")), tmp_path).run()
    record_property("result", {"name": run.name, "rows": rows(result), "faults": result.faults_found})
    with capsys.disabled():
        for row in rows(result):
            print("", *row, sep="  ", flush=True)
    assert not result.faults_found
