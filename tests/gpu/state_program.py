"""One learner rank that saves a training state and loads it into a new policy; prints its figures.

python state_program.py '{"model": FOLDER, "device": "cuda", "shape": "0.5B", "configs": {NAME: {...}}}'
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_shapes import SHAPES
from learner_program import make_batch, plain_logprobs, token_rows

from raylight.config import LearnerConfig
from raylight.experience.settings import PolicySettings

PROBE = list(range(20, 36))


def measure(
    model: str, config: dict[str, Any], rows: list[list[int]], known: list[list[float]], folder: str
) -> dict[str, Any]:
    """Continue a policy, and a new one from its state, by one update; return both probes and the seconds."""
    from raylight.learner import state, state_files
    from raylight.learner.policy import Policy

    settings = PolicySettings(lr=1e-5, max_logprob_mismatch=100.0)
    torch.manual_seed(0)
    policy = Policy(model, LearnerConfig(**config), settings, total_steps=4)
    policy.update(make_batch(rows, known, version=0))
    start = time.perf_counter()
    copies = state_files.HostCopies().copy(state.collect(policy))
    blocked = time.perf_counter() - start
    found = {
        "saved": policy.logprobs(PROBE),
        "on_host": all(copy.device.type == "cpu" for copy in copies.values()),
    }
    policy.update(make_batch(rows, known, version=1))  # while a state is written
    state_files.write(copies, folder)
    found |= {"blocked_s": blocked, "continued": policy.logprobs(PROBE)}
    del policy, copies
    torch.manual_seed(1)
    resumed = Policy(model, LearnerConfig(**config), settings, total_steps=4)
    start = time.perf_counter()
    state.load(resumed, folder)
    found["load_s"] = time.perf_counter() - start
    found["loaded"] = resumed.logprobs(PROBE)
    resumed.update(make_batch(rows, known, version=1))
    return found | {"resumed": resumed.logprobs(PROBE)}


def main(task: dict[str, Any]) -> dict[str, Any]:
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
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
