"""Weights reach two replicas of vLLM, each with one worker or with two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_replicas_receive_three_versions(tmp_path: Path, tensor_parallel_size: int) -> None:
    here = Path(__file__).parent
    paths = [str(here.parent / "helpers"), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(here / "transferred_weights.py"), str(tmp_path), str(tensor_parallel_size)],
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert max(found["after"]) < 1e-4
    assert min(found["before"]) > 0.01
