"""One rank that updates with several ways of sharding.

The model's output layer is a unit of FSDP, and its logits are computed in many chunks. Rank 0 returns, for
each way of sharding, the metrics, and the weights after two updates as sums by name. During the second
update, a thread reads a snapshot of the weights before it.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ranks import PROBE, make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.tokens import token_logprobs
from raylight.quickstart import STARTER_MODEL
from raylight.weights.source import WeightSource

VARIANTS = {
    "all": {},
    "pairs": {"fsdp_size": 2},
    "copies": {"fsdp_size": 1},
    "pairs-no-sync": {"fsdp_size": 2, "no_sync": True, "max_tokens_per_micro_batch": 18},
    "lora": {"lora": {"rank": 4, "target_modules": ["q_proj"]}, "fsdp_size": 2},
    "lora-all": {"lora": {"rank": 4, "target_modules": ["q_proj"]}},
}
SETTINGS = {"lr": 1e-3, "max_logprob_mismatch": 50.0, "kl_coef": 0.01, "entropy_coef": 0.01}


def save_untied_model(folder: Path) -> None:
    """Save a random model whose output layer is not tied to its embeddings."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(STARTER_MODEL)
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in Path(STARTER_MODEL).glob("*token*"):  # verl reads a tokenizer
        (folder / file.name).write_bytes(file.read_bytes())


def run(model: str, config: dict) -> dict[str, float]:
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(0)
    known = LearnerConfig(n=dist.get_world_size(), **config)
    policy = Policy(model, known, PolicySettings(**SETTINGS), 4)
    answers = [[-1.0] * (3 + i % 4) for i in range(8)]
    policy.update(make_batch(answers, version=0))
    before = policy.export() or {}
    source = WeightSource(policy.engine.module, torch.float32)
    source.take_snapshot()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(lambda: {name: tensor.numpy() for name, tensor in source})
        metrics = policy.update(make_batch(answers, version=1))
        snapshot = reading.result()
    assert all(np.array_equal(snapshot[name], array) for name, array in before.items())
    weights = policy.export() or {}
    changed = {name for name, array in weights.items() if not np.array_equal(snapshot[name], array)}
    assert changed or dist.get_rank()
    sums = {f"weight/{name}": float(abs(array).sum()) for name, array in weights.items()}
    probe = {f"probe/{i}": logprob for i, logprob in enumerate(policy.logprobs(PROBE))}
    return {"learner/grad_norm": metrics["learner/grad_norm"]} | sums | probe


def main(rank: int, ranks: int, folder: str) -> dict[str, dict[str, float]]:
    token_logprobs.CHUNK_LOGITS["cpu"] = 3 * AutoConfig.from_pretrained(folder).vocab_size
    chosen = VARIANTS if ranks % 2 == 0 else {name: VARIANTS[name] for name in ("all", "lora-all")}
    return {name: run(folder, config) for name, config in chosen.items()}
