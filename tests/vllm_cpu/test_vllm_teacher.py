"""A teacher in vLLM scores the tokens of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_teacher_in_vllm_scores_as_plain_transformers_does() -> None:
    here = Path(__file__).parent
    paths = [str(here.parent / "helpers"), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(here / "scored_rows.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1e-4
