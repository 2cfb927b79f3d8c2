"""Runs with one fault each: every run ends only when it should, and loses, falsifies or repeats nothing."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos_experiment import Experiment
from chaos_faults import FAULTS
from chaos_table import cells


@pytest.mark.slow(parts=2 * len(FAULTS))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(
    name: str,
    tmp_path: Path,
    record_property: Any,
    capsys: pytest.CaptureFixture,
    pytestconfig: pytest.Config,
) -> None:
    fault = replace(FAULTS[name], seed=pytestconfig.getoption("--chaos-seed"))
    if fault.action == "fill the disk" and os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    row = Experiment(fault, tmp_path).run()
    record_property("row", {"cells": cells(row), "faults": row.faults_found})
    with capsys.disabled():
        print("", *cells(row), sep="  ", flush=True)
    assert not row.faults_found
