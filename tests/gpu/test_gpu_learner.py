"""The learner on a GPU: precision, packed rows, peak memory, and the part of the device that it uses."""

from collections.abc import Callable
from typing import Any

import pytest
from gpu_shapes import SHAPES, peak_flops

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of gradient norms; in float32 also of log-probs, against plain transformers."""
MOST_ROUNDING = 1.5
"""Largest mean difference of log-probs in bfloat16 from float32, as a multiple of plain transformers'
difference: random weights round more than trained ones."""
CASES = [
    pytest.param("tiny", "cpu", "float32", marks=pytest.mark.slow),
    pytest.param("0.5B", "cuda", "bfloat16", marks=pytest.mark.gpu),
    pytest.param("1.5B", "cuda", "bfloat16", marks=pytest.mark.gpu),
]


def variants(device: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Return learner settings by name."""
    common = {"dtype": dtype, "gradient_checkpointing": device == "cuda"}
    return {"padded": common | {"packed": False}, "packed": common | {"packed": True}}


@pytest.mark.parametrize(("shape", "device", "dtype"), CASES)
def test_updates_agree_with_plain_transformers(
    shape: str,
    device: str,
    dtype: str,
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    """Padded and packed rows give the log-probs of plain transformers, and one gradient."""
    found = program(
        "learner_program.py",
        model=models(shape, device),
        device=device,
        shape=shape,
        configs=variants(device, dtype),
    )
    known, peak = SHAPES[shape], peak_flops()
    for name, result in found.items():
        metrics, speed = result["metrics"], result["tokens_per_s"]
        figure(f"{name}: log-probs, mean difference", metrics["mismatch/logprob_abs_mean"], "nats")
        figure(f"{name}: log-probs, largest difference", metrics["mismatch/logprob_abs_max"], "nats")
        figure(f"{name}: speed", speed, "tokens/s")
        figure(f"{name}: peak memory", result["peak_bytes"] / 2**30, "GiB")
        if peak:
            figure(f"{name}: MFU", 100 * known.flops(1, known.row_tokens, passes=3) * speed / peak, "%")
        figure(f"{name}: the same of plain transformers", result["rounding"], "nats")
        limit = TOLERANCE[dtype] if dtype == "float32" else MOST_ROUNDING * result["rounding"]
        assert metrics["mismatch/logprob_abs_mean"] < limit
        assert metrics["learner/grad_norm"] == pytest.approx(
            found["padded"]["metrics"]["learner/grad_norm"], rel=TOLERANCE[dtype]
        )
