"""Ranks of a learner in separate processes.

They are forked from one process that has imported the libraries: the imports take longer than most of what
the ranks do.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    "raylight.learner.updates.policy",
    "raylight.learner.updates.supervised",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
]


def run_ranks(main: Callable[..., Any], ranks: int, *arguments: Any, timeout_s: float = 300) -> list[Any]:
    """Call `main(rank, ranks, *arguments)` in each rank of a group; return the results by rank.

    Raises:
        Exception: the first error of a rank. All processes are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        calls = [(f"{folder}/meet", main, rank, ranks, *arguments) for rank in range(ranks)]
        finished = pool.imap_unordered(_call, calls)
        results = dict(finished.next(timeout_s) for _ in calls)
    return [results[rank] for rank in range(ranks)]


def _call(call: tuple[Any, ...]) -> tuple[int, Any]:
    meet, main, rank, ranks, *arguments = call
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meet, ranks), rank=rank, world_size=ranks)
    found = main(rank, ranks, *arguments)
    dist.destroy_process_group()
    return rank, found
