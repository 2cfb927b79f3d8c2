"""The engines on a GPU: precision of sampled log-probs, speed, sleep and wake."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from gpu_shapes import SHAPES, peak_flops

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest mean difference of log-probs to plain transformers in float32."""
CASES = [
    pytest.param("tiny", "cpu", "float32", marks=pytest.mark.slow),
    pytest.param("0.5B", "cuda", "bfloat16", marks=pytest.mark.gpu),
    pytest.param("1.5B", "cuda", "bfloat16", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
@pytest.mark.parametrize(("shape", "device", "dtype"), CASES)
def test_an_engine_samples_from_the_model(
    kind: str,
    shape: str,
    device: str,
    dtype: str,
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    """Sampled log-probs agree with plain transformers; sleep frees memory, and waking restores the model."""
    if kind == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    found = program(
        "engine_program.py", model=models(shape, device), device=device, shape=shape, kind=kind, dtype=dtype
    )
    known, peak, speed = SHAPES[shape], peak_flops(), found["tokens_per_s"]
    figure("log-probs, mean difference", found["difference_mean"], "nats")
    figure("log-probs, largest difference", found["difference_max"], "nats")
    figure("speed", speed, "tokens/s")
    if peak:
        figure("MFU", 100 * known.flops(1, known.answer_tokens // 2, passes=1) * speed / peak, "%")
    assert found["tokens"] == known.rows * known.answer_tokens
    assert found["difference_mean"] < TOLERANCE[dtype]
    assert found["changed"] < TOLERANCE[dtype]
    if device == "cuda":
        figure("freed by sleep", found["freed_bytes"] / 2**30, "GiB")
        assert found["not_asleep"] is None
        assert found["freed_bytes"] > known.parameters
    else:
        assert found["not_asleep"]
