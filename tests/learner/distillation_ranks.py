"""One rank that learns a teacher's distributions, and a plain loss over all logits for comparison."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks import ANSWERS, PROMPTS, gradients_of, make_batch

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL
from raylight.types import TopLogprobs

KINDS = ("forward_kl", "reverse_kl", "js")
OPTIONS = {"lr": 1e-3, "adv_estimator": "opd", "grad_clip": 1e9, "max_logprob_mismatch": 1e6}
TEMPERATURE = 0.8


def save_teacher(folder: Path, **sizes: Any) -> str:
    """Save a random model of another size than the student's, with more ids than it has. Return its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(STARTER_MODEL)
    own = {"hidden_size": 48, "vocab_size": config.vocab_size + 7, "tie_word_embeddings": False}
    config.update(own | sizes)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def settings_of(kind: str, top_k: int | None, *teachers: str, **more: Any) -> PolicySettings:
    given = OPTIONS | {"divergence": kind, "teacher_top_k": top_k} | more
    if kind == "js":
        given["js_beta"] = 0.3
    return PolicySettings(**given).with_local_teachers(teachers)


def update(
    settings: PolicySettings, tops: Any = None, numbers: list[int] | None = None, **learner: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the metrics of an update, and the gradient of its step."""
    from raylight.learner.updates.policy import Policy

    policy = Policy(STARTER_MODEL, LearnerConfig(**learner), settings, total_steps=2)
    gradients = gradients_of(policy.engine)
    batch = make_batch([[-1.0] * len(answer) for answer in ANSWERS])
    rows = [replace(row, temperature=TEMPERATURE if i < 4 else 1.0) for i, row in enumerate(batch.rows)]
    return policy.update(replace(batch, rows=rows, teacher_tops=tops, teacher_numbers=numbers)), gradients


def main(rank: int, ranks: int, kind: str, top_k: int | None, teacher: str) -> Any:
    settings = settings_of(kind, top_k, teacher)
    metrics, gradients = update(settings, n=ranks, max_tokens_per_micro_batch=48)
    return metrics, {name: grad.tolist() for name, grad in gradients.items()} if rank == 0 else None


@torch.no_grad()
def sent_tops(teacher_path: str, k: int) -> list[TopLogprobs]:
    """Return what a teacher's engine sends for the batch. As in `plain_update`, ids that the student lacks
    have probability 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(teacher_path)
    size, found = AutoConfig.from_pretrained(STARTER_MODEL).vocab_size, []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        logits = teacher(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logits[:, size:] = -torch.inf
        tops = (logits / (TEMPERATURE if number < 4 else 1.0)).log_softmax(-1).topk(k)
        found.append(TopLogprobs(tops.indices.int().numpy(), tops.values.numpy()))
    return found


def plain_update(
    kind: str, top_k: int | None, *teacher_paths: str, numbers: list[int] | None = None, beta: float = 0.3
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean divergence of all answers' tokens and its gradient, from whole logits."""
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    teachers = [AutoModelForCausalLM.from_pretrained(path) for path in teacher_paths]
    total, tokens = torch.zeros(()), 0
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        ids = torch.tensor([prompt + answer])
        own = student(ids).logits[0, len(prompt) - 1 : -1]
        with torch.no_grad():
            other = teachers[numbers[number] if numbers else 0](ids).logits[
                0, len(prompt) - 1 : -1, : own.shape[1]
            ]
        temperature = TEMPERATURE if number < 4 else 1.0
        p, q = (other / temperature).softmax(-1), (own / temperature).softmax(-1)
        if top_k is not None:
            top = p.topk(top_k).indices
            p, q = (torch.cat([x.gather(-1, top), 1 - x.gather(-1, top).sum(-1, True)], -1) for x in (p, q))
        total = total + plain_divergence(p, q, kind, beta).sum()
        tokens += len(answer)
    loss = total / tokens
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in student.named_parameters()}


def plain_divergence(p: torch.Tensor, q: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    middle = beta * p + (1 - beta) * q
    return beta * (p * (p / middle).log()).sum(-1) + (1 - beta) * (q * (q / middle).log()).sum(-1)
