"""One learner rank that saves a training state and loads it into a new policy; prints its figures.

python state_program.py '{"model": FOLDER, "device": "cuda", "shape": "0.5B", "configs": {NAME: {...}}}'
"""

import json
import sys
import time
from typing import Any

import torch
from learner_program import make_batch, run_rank

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings

PROBE = list(range(20, 36))


def measure(
    model: str, config: dict[str, Any], rows: list[list[int]], known: list[list[float]], folder: str
) -> dict[str, Any]:
    """Continue a policy, and a new one from its state, by one update; return both probes and the seconds."""
    from raylight.learner.state import state, state_files
    from raylight.learner.updates.policy import Policy

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


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]), measure)
