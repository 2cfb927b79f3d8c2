"""One rank that trains and saves mixtures of experts."""

from pathlib import Path
from typing import Any

import torch
from ranks import PROBE, make_batch, plain_logprobs

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings


def train_and_save(model: str, folder: Path, ranks: int, **config) -> dict:
    """Take one update and save the model; return the log-probs after it, and the layers that changed."""
    from transformers import AutoModelForCausalLM

    from raylight.learner.model.weights import save_model
    from raylight.learner.updates.policy import Policy
    from raylight.weights.source import WeightSource

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        batch = make_batch([logprobs.tolist() for logprobs in plain_logprobs(plain)])
    torch.manual_seed(0)  # of the adapter
    settings = PolicySettings(lr=1e-3, max_logprob_mismatch=1e-4)
    policy = Policy(model, LearnerConfig(n=ranks, max_tokens_per_micro_batch=64, **config), settings, 2)
    policy.update(batch)
    before = dict(WeightSource(plain, torch.float32))
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for name, tensor in WeightSource(policy.engine.module, torch.float32):
        layer = "experts" if ".experts." in name else name.split(".")[-2]
        names[not torch.equal(tensor, before[name])].add(layer)
    save_model(policy.engine, str(folder))
    return {"probe": policy.logprobs(PROBE), "changed": names[True], "unchanged": names[False]}


def main(rank: int, ranks: int, folder: Path, lora: dict[str, Any] | None = None) -> dict[str, list[float]]:
    """Return the log-probs of each model of a folder after its update."""
    return {
        path.name: train_and_save(str(path), folder / "saved" / path.name, ranks, lora=lora)["probe"]
        for path in sorted((folder / "models").iterdir())
    }
