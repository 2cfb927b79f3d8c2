"""One learner rank that updates with several algorithms."""

import torch
from ranks import make_batch, plain_logprobs

from raylight import algorithms
from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL

CASES = {
    "PPO": {"kl_reward_coef": 0.1, "kl_target": 0.5},
    "GMPO": {"mini_batches": 2},
    "OTB": {"rollout_is": "token"},
    "DrGRPO": {"mini_batches": 2, "max_staleness": 1, "proximal": "loglinear", "rollout_is": "sequence"},
}


def main(rank: int, ranks: int) -> dict[str, list[dict[str, float]]]:
    from transformers import AutoModelForCausalLM

    from raylight.learner.updates.policy import Policy

    plain = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    with torch.no_grad():
        exact = [logprobs.tolist() for logprobs in plain_logprobs(plain)]
    found = {}
    for name, more in CASES.items():
        algorithm = getattr(algorithms, name)(model="m", lr=1e-4, max_logprob_mismatch=100.0, **more)
        settings = PolicySettings(
            **{field: getattr(algorithm, field) for field in PolicySettings.model_fields}
        )
        torch.manual_seed(0)  # for the critic's head
        policy = Policy(
            STARTER_MODEL, LearnerConfig(n=ranks, max_tokens_per_micro_batch=64), settings, total_steps=2
        )
        first = policy.update(make_batch(exact))
        moved = policy.update(make_batch(exact))  # the policy now differs from reference and engine
        found[name] = [first, moved]
    return found
