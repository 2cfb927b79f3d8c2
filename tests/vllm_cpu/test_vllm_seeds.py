"""Replicas of vLLM sample with seeds of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_replicas_draw_different_random_numbers(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here.parent / "helpers"), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(here / "seeded_replicas.py"), str(tmp_path)],
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = json.loads(done.stdout.splitlines()[-1]).values()
    assert not set(one[:4]) & set(other[:4])
