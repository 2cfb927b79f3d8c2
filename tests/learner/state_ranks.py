"""One rank that continues from a training state."""

from typing import Any

import torch
from ranks import ANSWERS, PROBE, make_batch

from raylight.config import LearnerConfig, LoraConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.state.checkpoints import TrainingStates
from raylight.quickstart import STARTER_MODEL

WATCHED = (
    "learner/pg_loss",
    "learner/grad_norm",
    "learner/entropy",
    "learner/lr",
    "learner/kl",
    "learner/kl_reward_coef",
    "critic/vf_loss",
)


def make_policy(kind: str, ranks: int):
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(0)
    lora = LoraConfig(rank=4) if kind == "lora" else None
    settings_of = {
        "full": {"mini_batches": 2},
        "lora": {},
        "muon": {"optimizer": "muon"},
        "ppo": {
            "adv_estimator": "gae",
            "critic": {"lr": 1e-3},
            "kl_reward_coef": 0.1,
            "kl_target": 0.05,
            "kl_horizon": 20,
        },
    }
    settings = PolicySettings(
        lr=2e-3, lr_warmup_steps=4, kl_coef=1e-2, max_logprob_mismatch=100.0, **settings_of[kind]
    )
    return Policy(
        STARTER_MODEL,
        LearnerConfig(n=ranks, lora=lora, max_tokens_per_micro_batch=64),
        settings,
        total_steps=8,
    )


def config_of(kind: str) -> dict:
    """Return the part of a run's configuration that an export reads."""
    return {
        "algorithm": {"model": str(STARTER_MODEL)},
        "learner": {"lora": {"rank": 4} if kind == "lora" else None},
    }


def update(policy) -> dict[str, float]:
    """Update with the same tokens each time; the engine's log-probs are only compared."""
    batch = make_batch([[-1.0] * len(answer) for answer in ANSWERS], version=policy.version)
    metrics = policy.update(batch)
    return {name: metrics[name] for name in WATCHED if name in metrics}


def main(rank: int, ranks: int, folder: str, kind: str, load: int, updates: int) -> dict[str, Any]:
    """Load the state of step `load` in a folder (0: the initial model), update, and save a state.

    Returns:
        The metrics, and the log-probs after the updates.
    """
    from raylight.learner.state import state, state_files

    policy, states = make_policy(kind, ranks), TrainingStates(folder)
    if load:
        with states.reading(load) as content:
            state.load(policy, content)
    found = [update(policy) for _ in range(updates)]
    copies = state_files.HostCopies().copy(state.collect(policy))
    content = f"{folder}/step-{policy.version}/training-{load}-{updates}"
    state_files.write(copies, content)
    if rank == 0:
        states.complete(policy.version, {"config": config_of(kind)}, content)
    probe = policy.logprobs(PROBE)
    return {"version": policy.version, "steps": found, "probe": probe}
