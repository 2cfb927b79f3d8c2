"""One rank with two models, which makes updates and saves, loads and exports them."""

from typing import Any

import numpy as np
import torch
from ranks import ANSWERS, PROBE, make_batch

from raylight.config import LearnerConfig, LoraConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.protocol import ModelSettings
from raylight.quickstart import STARTER_MODEL

COMMON = {"max_logprob_mismatch": 100.0, "kl_coef": 1e-2, "weight_decay": 0.1}
MODELS = {
    "planner": ModelSettings(PolicySettings(lr=2e-3, lr_warmup_steps=3, grad_clip=0.5, **COMMON)),
    "coder": ModelSettings(PolicySettings(lr=5e-4, mini_batches=2, **COMMON)),
}


CONFIG = {
    "algorithm": {"model": str(STARTER_MODEL), "models": {name: {} for name in MODELS}},
    "learner": {"lora": {"rank": 4}},
}
"""Part of the run's configuration that an export reads."""


def part_of(name: str, version: int = 0) -> TrainBatch:
    """Return the part of a batch that one model is trained on; the coder's has other rewards."""
    batch = make_batch([[-1.0] * len(answer) for answer in ANSWERS], version)
    if name == "planner":
        return batch
    rewards = [float(i % 4 == 1) for i in range(len(batch.rewards))]
    return TrainBatch(rewards[:6], batch.groups[:6], batch.rows[:6], batch.owners[:6])


def joint_batch(version: int = 0, signals: tuple[str, ...] = ("planner", "coder")) -> TrainBatch:
    """Return the batch of both models, whose rollouts alternate."""
    parts = [(name, index) for index in range(8) for name in MODELS if not (name == "coder" and index > 5)]
    found = {name: part_of(name, version) for name in MODELS}
    return TrainBatch(
        [found[name].rewards[i] for name, i in parts],
        [f"{found[name].groups[i]}/{name}" for name, i in parts],
        [found[name].rows[i] for name, i in parts],
        list(range(len(parts))),
        models=[name for name, _ in parts],
        signals=frozenset(signals),
    )


def learner_config(ranks: int = 1) -> LearnerConfig:
    return LearnerConfig(n=ranks, lora=LoraConfig(rank=4), max_tokens_per_micro_batch=64)


def make_set(ranks: int = 1) -> Any:
    from raylight.learner.updates.policy_set import PolicySet

    torch.manual_seed(0)
    return PolicySet(STARTER_MODEL, learner_config(ranks), MODELS, total_steps=8)


def adapters_of(policies: Any) -> dict[str, dict[str, np.ndarray]] | None:
    found = {name: policies.use(name).export_adapter() for name in MODELS}
    return None if None in found.values() else {name: adapter[1] for name, adapter in found.items()}


def main(rank: int, ranks: int, folder: str, content: str) -> Any:
    """Update twice, with a state in between that a second set loads; return the adapters of both sets, and
    the log-probs of the probe in that state."""
    from raylight.learner.ranks.model_rank import ModelRank

    first = make_set(ranks)
    working = ModelRank(first)
    first.update(joint_batch())
    working.save_state(folder, 1, content, {"config": CONFIG}, keep=2, timeout_s=60)
    working.finish_saving(60)
    at_state = {name: working.logprobs(PROBE, name) for name in MODELS}
    second = make_set(ranks)
    ModelRank(second).load_state(folder, 1, 1)
    results = []
    for policies in (first, second):
        policies.update(joint_batch(policies.version))
        probes = {name: policies.use(name).logprobs(PROBE) for name in MODELS}
        results.append((adapters_of(policies), probes, policies.version))
    return results, at_state
