"""Losses and gradients equal a reference, written example by example after Tinker's pages."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from raylight.tinker.tinker_losses import LOSSES, RATIO_MASK, ROWS, SUBSTITUTES

LENGTHS = (1, 7, 12, 4)
Example = dict[str, Tensor]


def make_examples(scale: float) -> list[Example]:
    """Return examples whose ratios are around `exp(scale)` away from 1, with prompts before the responses."""
    torch.manual_seed(0)
    examples = []
    for length in LENGTHS:
        policy = torch.randn(length, dtype=torch.float64) - 3
        mask = (torch.arange(length) >= length // 3).double()
        sampled = (policy + scale * torch.randn(length).double()) * mask
        examples.append(
            {
                "policy": policy.requires_grad_(),
                "logprobs": sampled,
                "advantages": torch.randn(length).double() * mask,
                "weights": torch.rand(length).double(),
                RATIO_MASK: mask,
                "clip_low_threshold": 0.7 + 0.2 * torch.rand(length).double(),
                "clip_high_threshold": 1.1 + 0.2 * torch.rand(length).double(),
            }
        )
    return examples


def reference(name: str, example: Example, settings: Mapping[str, float]) -> Tensor:
    policy = example["policy"]
    if name == "cross_entropy":
        return -(policy * example["weights"]).sum()
    sampled, advantages = example["logprobs"], example["advantages"]
    thresholds = {name: torch.tensor(value) for name, value in settings.items()} | example
    low, high = (thresholds.get(f"clip_{side}_threshold") for side in ("low", "high"))
    ratio = torch.exp(policy - sampled)
    if name == "gspo":
        marked = example[RATIO_MASK] != 0
        log_ratio = (policy.detach() - sampled)[marked].mean()
        ratio = torch.exp(log_ratio + policy - policy.detach())
    match name:
        case "importance_sampling":
            losses = -(ratio * advantages)
        case "ppo" | "gspo":
            losses = -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
        case "cispo":
            losses = -(torch.clamp(ratio, low, high).detach() * policy * advantages)
        case "dro":
            losses = -(policy * advantages - 0.5 * settings["beta"] * (policy - sampled) ** 2)
        case _:
            raise AssertionError(f"there is no reference for {name}")
    return (losses * example.get("weights", torch.ones_like(losses))).sum()


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_those_of_the_reference(name: str, optional: bool, scale: float) -> None:
    loss, examples = LOSSES[name], make_examples(scale)
    names = {*loss.required, *(loss.optional if optional else ())}
    examples = [{key: values for key, values in e.items() if key in {"policy", *names}} for e in examples]
    expected = torch.stack([reference(name, example, loss.settings) for example in examples]).sum()
    policies = [example["policy"] for example in examples]
    gradients = torch.autograd.grad(expected, policies)
    inputs = {key: torch.cat([example[key] for example in examples]) for key in names}
    inputs[ROWS] = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    flat = torch.cat(policies).detach().requires_grad_()
    total = loss.function(flat, inputs, loss.settings).sum()
    (gradient,) = torch.autograd.grad(total, flat)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, torch.cat(gradients), rtol=1e-6, atol=1e-6)
    assert gradient.abs().max() > 0


def test_gspo_clips_examples_and_ppo_tokens() -> None:
    """Ratios of e and 1/e within an example have the mean 1, which no threshold clips."""
    policy = torch.tensor([1.0, -1.0], requires_grad=True)
    inputs = {
        "logprobs": torch.zeros(2),
        "advantages": torch.tensor([1.0, -1.0]),
        RATIO_MASK: torch.ones(2),
        ROWS: torch.zeros(2, dtype=torch.long),
    }
    for name, gradient in (("gspo", [-1.0, 1.0]), ("ppo", [0.0, 0.0])):
        total = LOSSES[name].function(policy, inputs, LOSSES[name].settings).sum()
        assert torch.autograd.grad(total, policy)[0].tolist() == pytest.approx(gradient)


def test_substitutes_of_stable_reinforce_take_its_inputs() -> None:
    assert SUBSTITUTES == ("importance_sampling", "ppo", "cispo", "dro")
