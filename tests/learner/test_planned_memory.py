"""Peaks of real processes against the plan, for two configurations of the benchmark."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "plan_memory.py"


@pytest.mark.slow
def test_a_learner_and_an_engine_take_the_planned_memory() -> None:
    command = [sys.executable, str(BENCHMARK), "--only", "lora;transformers engine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
