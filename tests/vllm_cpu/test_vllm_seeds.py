"""Replicas of vLLM sample with different seeds."""

import json
from pathlib import Path

import pytest
from vllm_helpers import run_program


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_replicas_draw_different_random_numbers(tmp_path: Path) -> None:
    done = run_program("seeded_replicas.py", tmp_path)
    one, other = json.loads(done.stdout.splitlines()[-1]).values()
    assert not set(one[:4]) & set(other[:4])
