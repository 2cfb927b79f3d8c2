"""Peak memory of an update, against the figure that `raylight plan` computes for it."""

from collections.abc import Callable
from typing import Any

import pytest

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.trainer.cluster_fit.model_shape import read_shape
from raylight.trainer.cluster_fit.role_needs import GPU_CONTEXT, learner_memory

TOLERANCE = {"cuda": 0.15, "cpu": 0.25}
"""Largest relative difference. On a CPU the tiny model is small compared with Python and its libraries, of
which a process without Ray loads fewer."""


def planned_bytes(model: str, config: dict[str, Any], device: str) -> int:
    """Return the planned peak of what `learner_program.py` measures: tensors on a GPU, else the process."""
    on_gpu = device == "cuda"
    learner = LearnerConfig(**config, num_gpus=float(on_gpu))
    memory = learner_memory(model, read_shape(model), learner, PolicySettings())
    return memory.total("device") - GPU_CONTEXT if on_gpu else memory.total("host")


@pytest.mark.parametrize(
    ("shape", "device", "dtype", "row_tokens", "checkpointing"),
    [
        pytest.param("tiny", "cpu", "float32", 64, True, marks=pytest.mark.slow),
        pytest.param("0.5B", "cuda", "bfloat16", 1024, True, marks=pytest.mark.gpu),
        pytest.param("0.5B", "cuda", "bfloat16", 1024, False, marks=pytest.mark.gpu),
        pytest.param("1.5B", "cuda", "bfloat16", 1024, True, marks=pytest.mark.gpu),
    ],
)
def test_an_update_takes_the_planned_memory(
    shape: str,
    device: str,
    dtype: str,
    row_tokens: int,
    checkpointing: bool,
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    model = models(shape, device)
    config = {
        "dtype": dtype,
        "gradient_checkpointing": checkpointing,
        "packed": False,
        "attention": "sdpa",
        "max_row_tokens": row_tokens,
        "max_tokens_per_micro_batch": 4 * row_tokens,
    }
    found = program(
        "learner_program.py", model=model, device=device, shape=shape, configs={"update": config}
    )["update"]
    planned = planned_bytes(model, config, device)
    figure("planned peak", planned / 2**30, "GiB")
    figure("measured peak", found["peak_bytes"] / 2**30, "GiB")
    assert planned == pytest.approx(found["peak_bytes"], rel=TOLERANCE[device])
