"""One learner rank, which makes two updates."""

from typing import Any

import torch
import torch.distributed as dist
from answer_rows import answer_logprobs, answer_row

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL
from raylight.weights.source import gather

PROMPTS = [[258, 84, 82, 68, 81, 198, 20 + i, 10, 21, 28, 256, 198] for i in range(8)]
ANSWERS = [[20 + i % 3, 21] + [22] * (i % 4) + [256] for i in range(8)]


def make_batch(logprobs: list[list[float]], version: int = 0) -> TrainBatch:
    """Eight rollouts in two groups; the rewards of each group differ, and so do the lengths of the rows."""
    rows = [
        answer_row(str(i), prompt, answer, logprobs[i], version)
        for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    ]
    return TrainBatch(
        [float(i % 3 == 0) for i in range(8)], [str(i // 4) for i in range(8)], rows, list(range(8))
    )


def plain_logprobs(model: torch.nn.Module) -> list[torch.Tensor]:
    """Log-probs of the answers' tokens by plain transformers."""
    return [answer_logprobs(model, *pair) for pair in zip(PROMPTS, ANSWERS, strict=True)]


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return a dict that receives the gradients of the next steps by name."""
    gradients: dict[str, torch.Tensor] = {}
    step = engine.optimizer_step

    def spied() -> float:
        parameters = engine.module.named_parameters()
        gradients.update({name: gather(p.grad).clone() for name, p in parameters if p.grad is not None})
        norm: float = step()
        return norm

    engine.optimizer_step = spied
    return gradients


def same(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(gradients[name], gradient, atol=1e-6 + 1e-4 * float(gradient.abs().max())), name


PROBE = [90, 84, 82, 68, 81, 20, 31, 77]


def plain_probe(model: torch.nn.Module) -> list[float]:
    """Log-probs of PROBE[1:] by plain transformers."""
    with torch.no_grad():
        return answer_logprobs(model, PROBE[:1], PROBE[1:]).tolist()


def main(rank: int, ranks: int, config: dict[str, Any] | None = None) -> list[dict[str, float]] | None:
    from transformers import AutoModelForCausalLM

    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(lr=1e-3, kl_coef=1e-2, max_logprob_mismatch=1e-3)
    learner = LearnerConfig(n=ranks, **config or {"max_tokens_per_micro_batch": 64})
    policy = Policy(STARTER_MODEL, learner, settings, total_steps=2)
    plain = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    with torch.no_grad():
        exact = [logprobs.tolist() for logprobs in plain_logprobs(plain)]
    first = policy.update(make_batch(exact))
    weights = policy.export()
    if weights is not None:
        plain.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    box = [None]
    if rank == 0:
        with torch.no_grad():
            box = [[logprobs.tolist() for logprobs in plain_logprobs(plain)]]
    dist.broadcast_object_list(box)
    probe = policy.logprobs(PROBE)
    probes = {f"probe/{i}": logprob for i, logprob in enumerate(probe)}
    second = policy.update(make_batch(box[0], version=1))
    if rank:
        return None
    difference = max(abs(a - b) for a, b in zip(probe, plain_probe(plain), strict=True))
    return [first, second | probes | {"probe/difference": difference}]
