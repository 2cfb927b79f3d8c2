"""One rank that updates with several settings."""

from collections.abc import Set

import torch
import torch.distributed as dist
from ranks import PROBE, make_batch, plain_logprobs

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.quickstart import STARTER_MODEL

LORA = {"lora": {"rank": 4, "alpha": 8}}
VARIANTS = {
    "padded": {},
    "packed": {"packed": True},
    "tight": {"max_tokens_per_micro_batch": 18},
    "tight-no-sync": {"max_tokens_per_micro_batch": 18, "no_sync": True},
    "replicated": {"fsdp_size": 1},
    "lora": LORA,
    "ulysses": {"packed": True, "ulysses": 2},
    "ulysses-split": {"packed": True, "ulysses": 2, "max_tokens_per_micro_batch": 9},
    "scaled": {},
    "critic": LORA,
    "critic-scaled": {},
}
QUICK = ("tight", "replicated", "lora", "ulysses-split", "scaled", "critic")
MOVED = ("padded", "packed", "tight")
SCALED, GAE = {"loss_agg_mode": "seq-mean-token-sum-norm"}, {"adv_estimator": "gae"}
CRITIC = {"lr": 1e-3, "mini_batches": 2}
OTHER_SETTINGS = {
    "scaled": SCALED,
    "critic": GAE | {"critic": CriticSettings(**CRITIC)},
    "critic-scaled": GAE | {"critic": CriticSettings(**CRITIC | SCALED)},
}
"""Settings of the algorithm in which variants differ from SETTINGS."""
SETTINGS = {"lr": 1e-3, "max_logprob_mismatch": 1e-3, "kl_coef": 0.01}


def update(config: dict, batch, **settings) -> dict[str, float]:
    """Update a new policy; return the metrics and the log-probs after it."""
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(0)
    known = PolicySettings(**SETTINGS | settings)
    policy = Policy(STARTER_MODEL, LearnerConfig(n=dist.get_world_size(), **config), known, 4)
    metrics = policy.update(batch)
    policy.export()
    return metrics | {f"probe/{i}": logprob for i, logprob in enumerate(policy.logprobs(PROBE))}


def all_updates(variants: Set[str]) -> dict[str, dict[str, float]]:
    """Return the results of the updates of these variants."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    with torch.no_grad():
        exact = [logprobs.tolist() for logprobs in plain_logprobs(plain)]
    batch = make_batch(exact)
    found = {name: update(VARIANTS[name], batch, **OTHER_SETTINGS.get(name, {})) for name in variants}
    # the old policy differs from the new one, more in short rows
    moved = make_batch([[value - 0.7 / len(row) for value in row] for row in exact])
    for name in variants & set(MOVED):
        config, critic = VARIANTS[name], CriticSettings(lr=1e-3, ppo_epochs=2, cliprange_value=1e-4)
        differs = {"bypass_mode": True, "max_logprob_mismatch": 50.0}
        found[f"moved-{name}"] = update(config, moved, critic=critic, **GAE, **differs)
    return found


def main(rank: int, ranks: int, variants: Set[str]) -> dict[str, dict[str, float]]:
    return all_updates(variants)
