"""Muon: updates equal torch's on one rank and on two, and states that change their number of ranks."""

from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from ranks import make_batch, plain_logprobs
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig, LoraConfig
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL

LR, DECAY, MOMENTUM, STEPS = 1e-3, 0.1, 0.9, 2


class Reference:
    """The starter model trained by torch's own Muon and AdamW, with the gradients of a policy.

    Orthogonalisation in bfloat16 amplifies rounding in directions in which a gradient is nearly 0, so that
    only equal gradients give equal updates.
    """

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
        self.named = dict(self.model.named_parameters())
        self.layers = {name for name, param in self.named.items() if ".layers." in name and param.dim() == 2}
        self._muon = torch.optim.Muon(
            [self.named[name] for name in sorted(self.layers)],
            lr=LR,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        )
        others = [self.named[name] for name in sorted(self.named.keys() - self.layers)]
        self._adamw = torch.optim.AdamW(others, lr=LR, weight_decay=DECAY)

    def step_with(self, engine: Any) -> None:
        """Have each optimizer step of an engine take a step here too."""
        own_step = engine.optimizer_step

        def step() -> float:
            for name, param in engine.module.named_parameters():
                gradient = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                self.named[name].grad = gradient.clone()
            norm: float = own_step()
            self._muon.step()
            self._adamw.step()
            return norm

        engine.optimizer_step = step


def train(rank: int, ranks: int) -> dict[str, Any]:
    """Update by ranks; return how far the weights are from the reference, and from the start, and the moments
    of each parameter."""
    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(
        lr=LR,
        weight_decay=DECAY,
        optimizer="muon",
        muon_momentum=MOMENTUM,
        max_logprob_mismatch=100.0,
        grad_clip=1e6,
    )
    policy = Policy(STARTER_MODEL, LearnerConfig(n=ranks, max_tokens_per_micro_batch=64), settings, STEPS)
    reference, start = Reference(), AutoModelForCausalLM.from_pretrained(STARTER_MODEL).state_dict()
    with torch.no_grad():
        sampled = [own.tolist() for own in plain_logprobs(reference.model)]
    reference.step_with(policy.engine)
    for version in range(STEPS):
        policy.update(make_batch(sampled, version))
    weights, state = policy.export(), policy.engine.optimizer.state
    found = {
        name: {"in_layers": name in reference.layers, "moments": sorted(state[param])}
        for name, param in policy.engine.module.named_parameters()
    }
    if weights is not None:
        for name, one in found.items():
            now = torch.from_numpy(weights[name])
            one["difference"] = float((now - reference.named[name].detach()).abs().max())
            one["moved"] = float((now - start[name]).abs().max())
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow("two ranks show it")), 2])
def test_updates_equal_those_of_torch(ranks: int) -> None:
    found = run_ranks(train, ranks)[0]
    assert {one["in_layers"] for one in found.values()} == {True, False}
    for name, one in found.items():
        expected = ["momentum_buffer"] if one["in_layers"] else ["exp_avg", "exp_avg_sq", "step"]
        assert one["moments"] == expected, name
        assert one["difference"] <= 1e-5 < one["moved"], name


def test_an_adapter_is_refused() -> None:
    from raylight.learner.model.verl_engines import build_policy

    with pytest.raises(ConfigError, match="optimizer='muon' makes all directions"):
        build_policy(STARTER_MODEL, LearnerConfig(lora=LoraConfig()), PolicySettings(optimizer="muon"), 1)


def test_a_momentum_that_nothing_reads_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing reads muon_momentum"):
        PolicySettings(muon_momentum=0.9)
