"""Mixtures of experts in vLLM: a source's names are loaded, and experts are repacked after updates."""

import json
from pathlib import Path

import pytest
from tiny_models import build_model
from vllm_helpers import run_program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3_moe", []),
        ("qwen2_moe", []),
        ("mixtral", []),
        ("olmoe", []),
        ("qwen3_moe", ["float32", "adapter"]),
    ],
)
def test_an_updated_mixture_computes_what_transformers_computes(
    model_type: str, options: list[str], tmp_path: Path
) -> None:
    model = build_model(model_type, tmp_path)
    done = run_program("weight_update.py", model, *options, timeout_s=200)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaded"] < 1e-4
    assert found["old"] > 0.01
    assert found["updated"] < 1e-4
