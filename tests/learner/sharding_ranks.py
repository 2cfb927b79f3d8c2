"""One rank that updates with several ways of sharding: python sharding_ranks.py RANK RANKS FOLDER.

The model's output layer is a unit of FSDP, and its logits are computed in many chunks. Rank 0 prints, for
each way of sharding, the metrics, and the weights after two updates as sums by name.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import PROBE, make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.experience.settings import PolicySettings
from raylight.learner import token_logprobs
from raylight.quickstart import STARTER_MODEL

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
    """Save a random model whose output layer has weights of its own."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(STARTER_MODEL)
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in Path(STARTER_MODEL).glob("*token*"):  # verl reads a tokenizer
        (folder / file.name).write_bytes(file.read_bytes())


def run(model: str, config: dict) -> dict[str, float]:
    from raylight.learner.policy import Policy

    torch.manual_seed(0)
    known = LearnerConfig(n=dist.get_world_size(), **config)
    policy = Policy(model, known, PolicySettings(**SETTINGS), 4)
    answers = [[-1.0] * (3 + i % 4) for i in range(8)]
    for version in range(2):
        metrics = policy.update(make_batch(answers, version=version))
    weights = policy.export() or {}
    sums = {f"weight/{name}": float(abs(array).sum()) for name, array in weights.items()}
    probe = {f"probe/{i}": logprob for i, logprob in enumerate(policy.logprobs(PROBE))}
    return {"learner/grad_norm": metrics["learner/grad_norm"]} | sums | probe


def main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    file = str(Path(folder) / f"meet-{ranks}")
    dist.init_process_group("gloo", store=dist.FileStore(file, ranks), rank=rank, world_size=ranks)
    token_logprobs.CHUNK_LOGITS["cpu"] = 3 * AutoConfig.from_pretrained(folder).vocab_size
    chosen = VARIANTS if ranks % 2 == 0 else {name: VARIANTS[name] for name in ("all", "lora-all")}
    found = {name: run(folder, config) for name, config in chosen.items()}
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
