"""Rows with the routes that engines record."""

import asyncio
from typing import Any

import numpy as np
import torch

from raylight.engines.capture_context import Sample
from raylight.engines.expert_routes import ExpertRoutes
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.types import Trajectory

GLM = {
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 3,
}
"""Settings of a tiny GLM 4 MoE."""


def sample(path: str, prompts: list[list[int]], tokens: int = 24, dtype: str = "float32") -> list[Trajectory]:
    """Sample a response to each prompt, the second half of them after the first; return rows with routes."""
    engine = TransformersEngine(path, "m", dtype=dtype, slots=8, max_model_len=128, record_routes=True)

    async def respond(asked: list[list[int]]) -> list[Trajectory]:
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i) for i in range(len(asked))]
        with engine.begin(asked, params) as choices:
            async for _ in choices.progress():
                pass
            return [as_row(sequence.sample) for sequence in choices.sequences]

    async def run() -> list[Trajectory]:
        half = len(prompts) // 2
        found = await respond(prompts[:half]) + await respond(prompts[half:])
        engine.close()
        return found

    return asyncio.run(run())


def as_row(drawn: Sample) -> Trajectory:
    """Return a sampled response as a row."""
    start, count = len(drawn.prompt_ids), len(drawn.output_ids)
    assert len(drawn.routed_experts) == start + count - 1
    return Trajectory(
        "r",
        drawn.token_ids,
        [0] * start + [1] * count,
        [0.0] * start + drawn.logprobs,
        [-1] * start + drawn.weight_versions,
        routed_experts=drawn.routed_experts,
    )


def check_routes(model: Any, recorded: Any) -> None:
    """Compare the routes of a row or a sample with one pass of a transformers model."""
    routes, ids = recorded.routed_experts, torch.tensor([recorded.token_ids.tolist()])
    with ExpertRoutes(model).recording() as found, torch.no_grad():
        model(ids, use_cache=False)
    assert routes.dtype == np.uint8
    np.testing.assert_array_equal(np.sort(routes, -1), np.sort(found()[:-1], -1))
