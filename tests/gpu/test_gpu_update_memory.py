"""Peak memory of an update on a GPU: it grows with tokens by activations, and not by logits."""

from collections.abc import Callable
from typing import Any

import pytest
from gpu_shapes import SHAPES

FLOAT32_BYTES = 4


@pytest.mark.parametrize(
    ("shape", "device", "dtype", "budgets"),
    [
        pytest.param("tiny", "cpu", "float32", (64, 256), marks=pytest.mark.slow),
        pytest.param("0.5B", "cuda", "bfloat16", (2048, 16_384), marks=pytest.mark.gpu),
        pytest.param("1.5B", "cuda", "bfloat16", (2048, 16_384), marks=pytest.mark.gpu),
    ],
)
def test_logits_are_in_memory_for_a_chunk_only(
    shape: str,
    device: str,
    dtype: str,
    budgets: tuple[int, int],
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    config = {"dtype": dtype, "gradient_checkpointing": True}
    peaks, norms = [], []
    for budget in budgets:
        found = program(
            "learner_program.py",
            model=models(shape, device),
            device=device,
            shape=shape,
            configs={"update": config | {"max_tokens_per_micro_batch": budget}},
        )["update"]
        figure(f"{budget} tokens a micro-batch: peak memory", found["peak_bytes"] / 2**30, "GiB")
        peaks.append(found["peak_bytes"])
        norms.append(found["metrics"]["learner/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=5e-2)
    if device == "cuda":  # the host's peak includes the imports
        growth = (peaks[1] - peaks[0]) / (budgets[1] - budgets[0])
        figure("peak memory for each further token", growth / 2**10, "KiB")
        assert growth < SHAPES[shape].vocabulary * FLOAT32_BYTES
