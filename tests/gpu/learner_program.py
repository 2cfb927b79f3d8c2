"""One learner rank in a separate process: reads its task as JSON from the command line, prints its figures.

python learner_program.py '{"model": FOLDER, "device": "cuda", "shape": "0.5B", "configs": {NAME: {...}}}'
"""

import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_shapes import SHAPES, Shape
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.types import Trajectory

GROUP = 2
"""Rollouts of a group."""
PROMPT_PART = 4
"""A quarter of each row is its prompt."""


def token_rows(shape: Shape) -> list[list[int]]:
    """Return random rows of two lengths, so that a padded batch has padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = [shape.row_tokens if i % 2 else shape.row_tokens * 3 // 4 for i in range(shape.rows)]
    return [torch.randint(shape.vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def plain_logprobs(model: str, device: str, rows: list[list[int]]) -> list[list[float]]:
    """Return the log-probs of each row's tokens after the first, by plain transformers in float32."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    return [_logprobs(plain, row, device) for row in rows]


@torch.no_grad()
def rounding(model: str, device: str, row: list[int]) -> float:
    """Return the mean difference of a row's log-probs in bfloat16 from those in float32, by plain
    transformers."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    exact = torch.tensor(_logprobs(plain, row, device))
    return float((torch.tensor(_logprobs(plain.bfloat16(), row, device)) - exact).abs().mean())


def _logprobs(plain: Any, row: list[int], device: str) -> list[float]:
    ids = torch.tensor([row], device=device)
    logprobs = plain(ids).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


def make_batch(rows: list[list[int]], logprobs: list[list[float]], version: int) -> TrainBatch:
    """Return a batch of one row for each rollout, with rewards 0 and 1 in each group."""
    trajectories = []
    for index, (row, known) in enumerate(zip(rows, logprobs, strict=True)):
        prompt = len(row) // PROMPT_PART
        answer = len(row) - prompt
        trajectories.append(
            Trajectory(
                str(index),
                row,
                [0] * prompt + [1] * answer,
                [0.0] * prompt + known[prompt - 1 :],
                [-1] * prompt + [version] * answer,
            )
        )
    groups = [str(index // GROUP) for index in range(len(rows))]
    rewards = [float(index % GROUP) for index in range(len(rows))]
    return TrainBatch(rewards, groups, trajectories, list(range(len(rows))))


def measure(
    model: str, config: dict[str, Any], rows: list[list[int]], known: list[list[float]], _folder: str
) -> dict[str, Any]:
    """Update a new policy twice; return the metrics of the first update and the cost of the second."""
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = PolicySettings(lr=1e-6, max_logprob_mismatch=100.0)
    policy = Policy(model, LearnerConfig(**config), settings, total_steps=4)
    metrics = policy.update(make_batch(rows, known, version=0))
    batch = make_batch(rows, known, version=1)
    start = time.perf_counter()
    policy.update(batch)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "metrics": metrics,
        "rounding": rounding(model, "cuda" if on_gpu else "cpu", rows[0]),
        "tokens_per_s": sum(map(len, rows)) / seconds,
        "peak_bytes": peak or host,
    }


def run_rank(task: dict[str, Any], measure: Callable[..., dict[str, Any]]) -> None:
    """Call `measure` for each configuration of a task as the only rank, and print the results.

    Args:
        measure: takes the model, a configuration, rows, their log-probs, and a folder that does not exist.
    """
    device = task["device"]
    rows = token_rows(SHAPES[task["shape"]])
    known = plain_logprobs(task["model"], device, rows)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "rendezvous"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        found = {
            name: measure(task["model"], config, rows, known, f"{folder}/{index}")
            for index, (name, config) in enumerate(task["configs"].items())
        }
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]), measure)
