"""Runs with one fault each: every run ends only when it should, and loses, falsifies or repeats nothing."""

from pathlib import Path

import pytest
from chaos_experiment import Experiment
from chaos_faults import FAULTS


@pytest.mark.slow(parts=2 * len(FAULTS))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, tmp_path: Path, record_row) -> None:
    row = Experiment(FAULTS[name], tmp_path).run()
    record_row(row)
    assert not row.faults_found
