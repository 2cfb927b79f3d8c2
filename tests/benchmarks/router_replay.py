"""Mismatch of engine and learner with and without router replay: python tests/benchmarks/router_replay.py.

It prints a table of small mixtures with random weights: the mean difference of log-probs of sampled
tokens and the divergence (k1) of engine and learner, without and with replay, in two precisions and for three
seeds.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raylight.config import LearnerConfig
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.experience.batch import TrainBatch
from raylight.experience.settings import PolicySettings
from raylight.types import Trajectory

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from routed_rows import GLM, as_row
from tiny_models import build_model

LARGER: dict[str, Any] = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 4}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": LARGER,
    "gpt_oss": LARGER | {"num_local_experts": 16, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "glm4_moe": GLM | LARGER | {"n_routed_experts": 16, "num_local_experts": 16},
}
ROWS, TOKENS = 16, 96


def sample(path: str, dtype: str, seed: int) -> list[Trajectory]:
    """Sample a response to each of several prompts."""
    engine = TransformersEngine(path, "m", dtype=dtype, slots=ROWS, max_model_len=256, record_routes=True)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, 250, (ROWS, 24), generator=generator).tolist()
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed + i) for i in range(ROWS)]

    async def run() -> list[Trajectory]:
        with engine.begin(prompts, params) as choices:
            async for _ in choices.progress():
                pass
            return [as_row(sequence.sample) for sequence in choices.sequences]

    rows = asyncio.run(run())
    engine.close()
    return rows


def mismatch(path: str, rows: list[Trajectory], dtype: Any, replay: bool) -> tuple[float, float]:
    """Return the mean difference of log-probs and the divergence, before an update."""
    from raylight.learner.policy import Policy

    learner = LearnerConfig(dtype=dtype, router_replay=replay)
    policy = Policy(path, learner, PolicySettings(lr=1e-6, max_logprob_mismatch=100.0), 2)
    batch = TrainBatch([float(i % 2) for i in range(ROWS)], ["g"] * ROWS, rows, list(range(ROWS)))
    found = policy.update(batch)
    return found["mismatch/logprob_abs_mean"], found["mismatch/kl"]


def main() -> None:
    torch.set_num_threads(1)
    for model_type, settings in MIXTURES.items():
        for dtype in ("float32", "bfloat16"):
            for seed in range(3):
                with tempfile.TemporaryDirectory() as folder:
                    path = build_model(model_type, Path(folder), **settings)
                    rows = sample(path, dtype, seed)
                    without, replayed = (mismatch(path, rows, dtype, replay) for replay in (False, True))
                    figures = [f"{value:.2e}" for value in (*without, *replayed)]
                    print("|", " | ".join([model_type, dtype, str(seed), *figures]), "|", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as rendezvous:
        store = dist.FileStore(f"{rendezvous}/ranks", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        main()
        dist.destroy_process_group()
