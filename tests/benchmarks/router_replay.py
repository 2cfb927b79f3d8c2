"""Mismatch of engine and learner, and learning, with and without router replay.

    python tests/benchmarks/router_replay.py [--learn] [--seeds 3] [--steps 200]

It prints a table of small mixtures with random weights: the mean difference of log-probs of sampled
tokens and the divergence (k1) of engine and learner, without and with replay, in two precisions and for three
seeds.

With --learn, GRPO trains a LoRA adapter of the packed experts of a small Qwen3-MoE, in this process: the
engine in bfloat16, the learner in float32. All scores of a router have a large part in common, which is
nothing to a softmax and rounds away what tells experts apart in bfloat16, so that both choose others for many
tokens. The reward is the share of tokens of a kind that a quarter of the vocabulary has. It prints the mean
rewards of ten steps each, and the mean difference of log-probs.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import make_parser
from safetensors.torch import load_file, save_file

from raylight.config import LearnerConfig
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.types import Trajectory
from raylight.weights.source import WeightSource

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from routed_rows import GLM, as_row
from tiny_models import build_model
from weight_loading import load_weights

LARGER: dict[str, Any] = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 4}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": LARGER,
    "gpt_oss": LARGER | {"num_local_experts": 16, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "glm4_moe": GLM | LARGER | {"n_routed_experts": 16, "num_local_experts": 16},
}
ROWS, TOKENS = 16, 96
GROUPS, GROUP, ANSWER = 4, 8, 8
"""Groups of a step, rollouts of a group and tokens of a rollout, in learning."""
COMMON, GAIN = 30.0, 5.0
"""Scale of the common part of a router's scores, and of what experts add."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 1}
LORA: dict[str, Any] = {
    "rank": 4,
    "target_modules": ["k_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def sample(path: str, dtype: str, seed: int) -> list[Trajectory]:
    """Sample a response to each of several prompts."""
    engine = TransformersEngine(path, "m", dtype=dtype, slots=ROWS, max_model_len=256, record_routes=True)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, 250, (ROWS, 24), generator=generator).tolist()
    rows = asyncio.run(respond(engine, prompts, TOKENS, seed))
    engine.close()
    return rows


async def respond(
    engine: TransformersEngine, prompts: list[list[int]], tokens: int, seed: int
) -> list[Trajectory]:
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed + i) for i in range(len(prompts))]
    with engine.begin(prompts, params) as choices:
        async for _ in choices.progress():
            pass
        return [as_row(sequence.sample) for sequence in choices.sequences]


def mismatch(path: str, rows: list[Trajectory], dtype: Any, replay: bool) -> tuple[float, float]:
    """Return the mean difference of log-probs and the divergence, before an update."""
    from raylight.learner.updates.policy import Policy

    learner = LearnerConfig(dtype=dtype, router_replay=replay)
    policy = Policy(path, learner, PolicySettings(lr=1e-6, max_logprob_mismatch=100.0), 2)
    batch = TrainBatch([float(i % 2) for i in range(ROWS)], ["g"] * ROWS, rows, list(range(ROWS)))
    found = policy.update(batch)
    return found["mismatch/logprob_abs_mean"], found["mismatch/kl"]


async def learning_curve(path: str, replay: bool, steps: int, seed: int) -> tuple[list[float], float]:
    """Return the mean reward of the rollouts of each step, and the mean difference of log-probs."""
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(seed)
    learner = LearnerConfig(router_replay=replay, lora=LORA)  # type: ignore[arg-type]
    policy = Policy(path, learner, PolicySettings(lr=1e-2, max_logprob_mismatch=100.0), steps)
    engine = TransformersEngine(
        path, "m", dtype="bfloat16", slots=GROUPS * GROUP, max_model_len=64, record_routes=True
    )
    curve, differences = [], []
    prompts = [[90, 84, 82 + group] for group in range(GROUPS) for _ in range(GROUP)]
    for step in range(steps):
        rows = await respond(engine, prompts, ANSWER, seed=100_000 * seed + 1000 * step)
        rewards = [float((row.token_ids[-ANSWER:] % 4 == 1).mean()) for row in rows]
        curve.append(statistics.fmean(rewards))
        named = [replace(row, rollout_id=str(index)) for index, row in enumerate(rows)]
        groups = [str(index // GROUP) for index in range(len(rows))]
        batch = TrainBatch(rewards, groups, named, list(range(len(rows))))
        metrics = await asyncio.to_thread(policy.update, batch)
        differences.append(metrics["mismatch/logprob_abs_mean"])
        source = WeightSource(policy.engine.module, torch.float32, names="module")
        await load_weights(engine, step + 1, dict(source))
    engine.close()
    return curve, statistics.fmean(differences)


def build_rounded(folder: Path) -> str:
    """Save a mixture whose routers choose by rounding in bfloat16; return its folder."""
    path = build_model("qwen3_moe", folder, **EXPERTS)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weights[name] = weight + COMMON * torch.randn(weight.shape[1], generator=generator)
        elif name.endswith("down_proj.weight"):
            weights[name] = weight * GAIN
    save_file(weights, file, metadata={"format": "pt"})
    return path


def learn(seeds: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build_rounded(Path(folder))
        for seed in range(seeds):
            for replay in (False, True):
                with contextlib.redirect_stdout(sys.stderr):  # verl prints
                    curve, difference = asyncio.run(learning_curve(path, replay, steps, seed))
                means = [round(statistics.fmean(curve[i : i + 10]), 2) for i in range(0, steps, 10)]
                title = "with replay" if replay else "without replay"
                print(seed, title, means, f"difference {difference:.2f}", flush=True)


def compare(seeds: int) -> None:
    for model_type, settings in MIXTURES.items():
        for dtype in ("float32", "bfloat16"):
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as folder:
                    path = build_model(model_type, Path(folder), **settings)
                    rows = sample(path, dtype, seed)
                    without, replayed = (mismatch(path, rows, dtype, replay) for replay in (False, True))
                    figures = [f"{value:.2e}" for value in (*without, *replayed)]
                    print("|", " | ".join([model_type, dtype, str(seed), *figures]), "|", flush=True)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--learn", action="store_true", help="train instead of comparing log-probs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; they count from 0")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as rendezvous:
        store = dist.FileStore(f"{rendezvous}/ranks", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        learn(args.seeds, args.steps) if args.learn else compare(args.seeds)
        dist.destroy_process_group()
