"""Training of a tiny policy on toys that plain transformers play in this process, without Ray.

Trajectories, batches, advantages, losses and the optimizer are raylight's own.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import save_random
from transformers import AutoModelForCausalLM, Qwen2Config

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import LearnerConfig
from raylight.experience.batches.batch import build_batch
from raylight.types import FinishedRollout, Generation, Rollout, Span

GROUP, GROUPS = 8, 4
"""Rollouts of a group, and groups of a step."""
Play = Callable[[torch.nn.Module, int, int], list[FinishedRollout]]
"""Function from a model, its version and the number of a step to the rollouts of the step."""


def finish(
    step: int, rollout: int, reward: float, calls: list[Generation], spans: Sequence[Span] = ()
) -> FinishedRollout:
    """Return a rollout that succeeded, in the group of its number."""
    made = Rollout(
        input=None,
        rollout_id=f"{step}-{rollout}",
        group_id=f"{step}-{rollout // GROUP}",
        status="succeeded",
        start_time=0.0,
    )
    return FinishedRollout(made, reward, calls, list(spans))


def learning_curve(
    algorithm: type[PolicyAlgorithm], settings: dict[str, Any], play: Play, steps: int, lr: float, seed: int
) -> list[float]:
    """Train a new policy; return the mean reward of the rollouts of each step."""
    from raylight.learner.updates.policy import Policy

    config = Qwen2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = save_random(config, Path(folder, "model"))
        torch.manual_seed(seed)
        common = {"lr": lr, "group_size": GROUP, "tasks_per_step": GROUPS, "max_logprob_mismatch": 1e-3}
        chosen, learner = algorithm(model=path, **common | settings), LearnerConfig()
        policy = Policy(path, learner, chosen.policy_settings(), steps)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        curve = []
        for step in range(steps):
            finished = play(model, policy.version, step)
            curve.append(statistics.fmean(item.reward or 0.0 for item in finished))
            batch, report = build_batch(finished, chosen.batch_rules(learner))
            if report.has_signal:
                policy.update(batch)
                weights = policy.export()
                assert weights is not None, "this is rank 0"
                model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        return curve
