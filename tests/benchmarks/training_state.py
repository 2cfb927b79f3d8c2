"""Saving and loading a training state: seconds, and peak memory of each rank, sharded and gathered.

    python tests/benchmarks/training_state.py [--millions 20 125] [--ranks 1 2] [--folder FOLDER]

"sharded" is what raylight does: every rank copies its shards, and writes them in the background. "gathered"
is the common way: rank 0 gathers the whole model and optimizer, and writes one file. Memory is the increase
of a rank's resident memory, at its peak, over that of the model, with its moments if it is saved. A fresh
model is loaded into; its moments are part of the increase. Each figure is of processes of its own. "ratio" is
that of sharded to gathered, each of its slowest or largest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import join_ranks, make_parser, memory_kib, reset_peak, save_random

SIZES = {20: (256, 12), 125: (768, 12), 350: (1024, 24), 500: (1280, 18)}
"""Millions of parameters -> width and layers of the model."""


def measure(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the seconds of some work, the increase of resident memory at its peak in MB, and its result."""
    reset_peak()
    before = memory_kib("VmRSS")
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, (memory_kib("VmHWM") - before) / 1024, result


def make_model(folder: Path, millions: int) -> None:
    """Write a model with random weights."""
    from transformers import Qwen3Config

    width, layers = SIZES[millions]
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    save_random(config, folder)


class Ranked:
    """An engine with moments, and the part of a Policy that a state needs."""

    def __init__(self, model: str, ranks: int, trained: bool) -> None:
        import torch

        from raylight.config import LearnerConfig
        from raylight.experience.settings.policy_settings import PolicySettings
        from raylight.learner.model.engines import build_policy

        self.engine = build_policy(model, LearnerConfig(n=ranks), PolicySettings(), 10)
        self.engines, self.version = {"policy": self.engine}, 1
        if trained:
            for param in self.engine.module.parameters():
                param.grad = torch.randn_like(param)
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad()

    def progress(self) -> dict[str, Any]:
        return {}

    def restore_progress(self, progress: dict[str, Any]) -> None:
        pass


def save_sharded(policy: Any, folder: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    from raylight.learner.state import state, state_files

    copies = state_files.HostCopies()
    return lambda: copies.copy(state.collect(policy)), lambda content: state_files.write(content, folder)


def load_sharded(policy: Any, folder: str) -> None:
    from raylight.learner.state import state

    state.load(policy, folder)


def save_gathered(policy: Any, folder: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    import torch
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def gather() -> Any:
        module, optimizer = policy.engine.module, policy.engine.optimizer
        content: dict[str, Any] = {
            "model": get_model_state_dict(module, options=options),
            "optimizer": get_optimizer_state_dict(module, optimizer, options=options),
        }
        if torch.distributed.get_rank():
            return None
        return {
            part: {name: clone(value) for name, value in tensors.items()} for part, tensors in content.items()
        }

    def clone(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clone(item) for name, item in value.items()}
        return value.clone() if isinstance(value, torch.Tensor) else value

    def write(content: Any) -> None:
        if content is not None:
            with open(f"{folder}.pt", "wb") as file:
                torch.save(content, file)
                os.fsync(file.fileno())

    return gather, write


def load_gathered(policy: Any, folder: str) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    content: Any = {"model": {}, "optimizer": {}}
    if torch.distributed.get_rank() == 0:
        content = torch.load(f"{folder}.pt", weights_only=True)
    module, optimizer = policy.engine.module, policy.engine.optimizer
    set_model_state_dict(module, content["model"], options=options)
    set_optimizer_state_dict(module, optimizer, content["optimizer"], options=options)


def run_rank(rank: int, ranks: int, meet: str, model: str, folder: str, way: str, phase: str) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(rank)
    join_ranks(meet, rank, ranks)
    save, load = (save_sharded, load_sharded) if way == "sharded" else (save_gathered, load_gathered)
    policy = Ranked(model, ranks, trained=phase != "load")
    row: dict[str, float] = {}
    dist.barrier()
    if phase == "load":
        row["load_s"], row["load_mb"], _ = measure(lambda: load(policy, folder))
    elif phase == "save":
        collect, write = save(policy, folder)
        _, row["save_mb"], _ = measure(lambda: write(collect()))
    else:
        collect, write = save(policy, folder)
        row["blocked_s"], _, content = measure(collect)
        dist.barrier()
        row["total_s"] = row["blocked_s"] + measure(lambda: write(content))[0]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(row))


def run(folder: Path, millions: int, ranks: int, way: str) -> list[dict[str, float]]:
    """Return a row of figures for each rank."""
    rows: list[dict[str, float]] = [{} for _ in range(ranks)]
    for phase in ("time", "save", "load"):
        name = f"{way}-{millions}-{ranks}"
        meet, model = folder / f"{name}-{phase}", folder / f"model-{millions}"
        arguments = [str(meet), str(model), str(folder / name), way, phase]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(ranks), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]
        for row, process in zip(rows, started, strict=True):
            row |= json.loads(process.communicate()[0].strip().splitlines()[-1])
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[20, 125], choices=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="folder of the disk to write to")
    parser.add_argument("--rank", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, *rest = options.rank
        run_rank(int(rank), int(ranks), *rest)
        return
    columns = ("blocked_s", "total_s", "load_s", "save_mb", "load_mb")
    print(f"{'parameters':>10} {'ranks':>5} {'way':>9}" + "".join(f"{name:>22}" for name in columns))
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for millions in options.millions:
            make_model(Path(temporary, f"model-{millions}"), millions)
            for ranks in options.ranks:
                found = {way: run(Path(temporary), millions, ranks, way) for way in ("gathered", "sharded")}
                start = f"{millions:>9}M {ranks:>5}"
                for way, rows in found.items():
                    cells = (
                        " / ".join(f"{row[name]:.{decimals(name)}f}" for row in rows) for name in columns
                    )
                    print(f"{start} {way:>9}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
                worst = {way: [max(row[name] for row in found[way]) for name in columns] for way in found}
                ratios = (a / b for a, b in zip(worst["sharded"], worst["gathered"], strict=True))
                print(f"{start} {'ratio':>9}" + "".join(f"{ratio:>22.2f}" for ratio in ratios), flush=True)


def decimals(column: str) -> int:
    return 2 if column.endswith("_s") else 0


if __name__ == "__main__":
    main()
