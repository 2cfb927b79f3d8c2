"""A run that replays the engine's routes: they pass the store and the learners' process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import build_model

import raylight as rl
from raylight.quickstart.additions import additions, question
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import FinishedRollout

pytestmark = pytest.mark.usefixtures("connected_on_one_thread")


@rl.rollout
async def measured(task: dict[str, Any], llm: rl.LLM) -> float:
    """Sample an answer; the reward tells answers of a random model apart."""
    answer = await llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": question(task)}]
    )
    return float(sum(map(ord, answer.choices[0].message.content or "")) % 7)


async def stored_rollouts(path: Path) -> list[FinishedRollout]:
    store = StoreClient(StoreService(path, read_only=True))
    return await store.collect([rollout.rollout_id for rollout in await store.query_rollouts()])


@pytest.mark.slow
def test_a_run_replays_the_routes_of_the_engine(tmp_path: Path) -> None:
    model = build_model("qwen3_moe", tmp_path / "model")
    algorithm = rl.GRPO(model=model, lr=1e-3, n_steps=2, tasks_per_step=2, group_size=4, val_every=0)
    trainer = rl.Trainer(
        algorithm=algorithm,
        learner={"router_replay": True},
        engine={"kind": "transformers", "max_model_len": 64, "args": {"max_new_tokens": 8}},
        output_dir=tmp_path / "run",
        progress=False,
    )
    trainer.fit(measured, additions(0)[0])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [metrics for metrics in map(json.loads, lines) if "mismatch/logprob_abs_mean" in metrics]
    assert len(steps) == 2
    assert all(metrics["mismatch/logprob_abs_mean"] < 1e-4 for metrics in steps)
    for rollout in asyncio.run(stored_rollouts(tmp_path / "run" / "store.db")):
        for call in rollout.generations:
            assert call.routed_experts is not None
            assert call.routed_experts.shape == (len(call.token_ids) - 1, 2, 2)
            assert call.routed_experts.dtype == np.uint8
