"""Memory that `raylight plan` computes, and the peak of real processes, for several configurations.

    python tests/benchmarks/plan_memory.py [--only "full;lora"] [--layers 8]

A learner's rank is a separate process that updates a random Qwen2 (100 million parameters with 8 layers)
twice with full micro-batches. The engine is a process that samples as many sequences at once as it may, each
as long as the context. The peak is the kernel's (VmHWM). Two configurations run at a time; exits with 1 if a
plan is more than 15 % off.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import join_ranks, make_parser, memory_kib, save_random

from raylight.config import EngineConfig, LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings

VOCABULARY = 16_000
TOLERANCE = 0.15
MIB = 2**20
LEARNER = {"max_tokens_per_micro_batch": 1024, "max_row_tokens": 128}
LEARNERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "lora": ({"lora": {"rank": 16}}, {"kl_coef": 0.1}),
    "reference, 2 ranks": ({"n": 2}, {"kl_coef": 0.1}),
    "critic": ({"gradient_checkpointing": True}, {"adv_estimator": "gae", "critic": {}}),
    "mixture of experts": ({"gradient_checkpointing": True}, {}),
}
"""Settings of the learner and of the policy, by configuration."""
ENGINE = {"max_concurrent": 32, "max_model_len": 512, "num_cpus": 1}


def random_model(folder: Path, layers: int, mixture: bool) -> str:
    """Save a model with random weights. Return its path."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config: Any = Qwen2Config(**common, intermediate_size=3072)
    if mixture:
        config = Qwen3MoeConfig(**common, head_dim=64, num_experts=8, moe_intermediate_size=384)
    return save_random(config, folder)


def run_learner(rank: int, task: dict[str, Any]) -> None:
    """Update twice as one rank, and print the peak."""
    import torch.distributed as dist
    from learner_tokens import as_batch

    from raylight.learner.ranks.actor import keep_freed_memory
    from raylight.learner.state import state
    from raylight.learner.state.state_files import HostCopies
    from raylight.learner.updates.policy import Policy

    keep_freed_memory()
    config = LearnerConfig(**task["learner"])
    join_ranks(task["rendezvous"], rank, config.n)
    policy = Policy(task["model"], config, PolicySettings(**task["settings"]), 10)
    draw = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(n)]

    rows = [(tokens(8), tokens(config.row_limit - 8)) for _ in range(16 * config.n)]
    copies = HostCopies()
    for _ in range(2):
        policy.update(as_batch(rows, policy.version))
        copies.copy(state.collect(policy))
    print(memory_kib("VmHWM") * 1024, flush=True)
    dist.destroy_process_group()


def run_engine(task: dict[str, Any]) -> None:
    """Fill all slots of a transformers engine, and print the peak."""
    import torch

    from raylight.engines.transformers.engine import TransformersEngine
    from raylight.engines.transformers.sampling import SamplingParams

    torch.set_num_threads(1)
    config = EngineConfig(**task["engine"])

    async def sample() -> None:
        engine = TransformersEngine(
            task["model"], "policy", slots=config.max_concurrent, max_model_len=config.max_model_len
        )
        prompts = [  # all differ: the engine computes equal ones once
            list(range(first, first + config.max_model_len - 8))
            for first in range(100, 100 + config.max_concurrent)
        ]
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        engine.close()

    asyncio.run(sample())
    print(memory_kib("VmHWM") * 1024, flush=True)


def planned_learner(model: str, task: dict[str, Any]) -> int:
    from raylight.trainer.cluster_fit.model_shape import read_shape
    from raylight.trainer.cluster_fit.role_needs import learner_memory

    config, settings = LearnerConfig(**task["learner"]), PolicySettings(**task["settings"])
    return learner_memory(model, read_shape(model), config, settings).total("host")


def planned_engine(model: str, task: dict[str, Any]) -> int:
    from raylight.trainer.cluster_fit.model_shape import read_shape
    from raylight.trainer.cluster_fit.role_needs import engine_memory

    config = EngineConfig(**{"kind": "transformers"} | task["engine"])
    return engine_memory(model, read_shape(model), config, 0).total("host")


def measure(task: dict[str, Any]) -> int:
    """Return the highest peak of the processes of a task."""
    ranks = int(task.get("learner", {}).get("n", 1))
    command = [sys.executable, __file__, "--task", json.dumps(task)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a process of {task} failed; run it by itself: {' '.join(command)} --rank 0")
    return max(int(output.split()[-1]) for output in outputs)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="names of configurations, separated by semicolons")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        task = json.loads(args.task)
        run_engine(task) if "engine" in task else run_learner(args.rank, task)
        return
    wanted = args.only.split(";") if args.only else [*LEARNERS, "transformers engine"]
    print(f"{'configuration':22} {'planned':>10} {'measured':>10} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
        models = {
            mixture: random_model(Path(folder, f"model-{mixture}"), args.layers, mixture)
            for mixture in (False, True)
        }
        tasks = [make_task(name, models[name == "mixture of experts"], folder) for name in wanted]
        measured = executor.map(measure, tasks)  # starts all
        ratios = []
        for name, task, peak_bytes in zip(wanted, tasks, measured, strict=True):
            planned = (planned_learner if "learner" in task else planned_engine)(task["model"], task)
            ratios.append(planned / peak_bytes)
            sizes = f"{planned / MIB:6.0f} MiB {peak_bytes / MIB:6.0f} MiB"
            print(f"{name:22} {sizes} {ratios[-1]:6.2f}", flush=True)
    sys.exit(any(abs(ratio - 1) > TOLERANCE for ratio in ratios))


def make_task(name: str, model: str, folder: str) -> dict[str, Any]:
    """Return the task of a configuration for its processes."""
    if name not in LEARNERS:
        return {"model": model, "engine": ENGINE}
    learner, settings = LEARNERS[name]
    return {
        "model": model,
        "learner": LEARNER | learner,
        "settings": {"calculate_entropy": False, "max_logprob_mismatch": 1e6} | settings,
        "rendezvous": f"{folder}/{name}",
    }


if __name__ == "__main__":
    main()
