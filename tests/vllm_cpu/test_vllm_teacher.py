"""A teacher in vLLM scores the tokens of a run."""

import pytest
from vllm_helpers import run_program


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_teacher_in_vllm_scores_as_plain_transformers_does() -> None:
    assert float(run_program("scored_rows.py").stdout.splitlines()[-1]) < 1e-4
