"""Accuracy of students over the steps of a distillation, by divergence.

    python tests/benchmarks/distillation_steps.py [--seeds 3] [--steps 12] [--rows 16]

The student is the quickstart's model with noise in its matrices; the teacher is the quickstart's model after
fine-tuning on right sums. A step is 16 answers of the student's own, without rewards. The accuracy is the
mean probability of the right answer to 128 sums that are in no training. All divergences see the same sums in
the same order; each has the same learning rate.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import join_ranks, make_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.updates.policy import Policy
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, question
from raylight.types import Trajectory

TAUGHT, ANSWER = 64, 5
DIVERGENCES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "js": {"divergence": "js"},
    "reverse_kl, top 8": {"divergence": "reverse_kl", "teacher_top_k": 8},
}
TOKENIZER = AutoTokenizer.from_pretrained(STARTER_MODEL)


def prompt_of(task: dict[str, Any]) -> list[int]:
    messages = [{"role": "user", "content": question(task)}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def answer_of(task: dict[str, Any]) -> list[int]:
    text = str(task["a"] + task["b"])
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def logprobs_of(model: Any, rows: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """Return the log-probs of the answers of (prompt, answer) pairs."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.tensor([p + a + [0] * (longest - len(p) - len(a)) for p, a in rows])
    logprobs = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    found = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    return [row[len(p) - 1 : len(p) + len(a) - 1] for row, (p, a) in zip(found, rows, strict=True)]


def accuracy(model: Any, tasks: list[dict[str, Any]]) -> float:
    with torch.no_grad():
        found = logprobs_of(model, [(prompt_of(task), answer_of(task)) for task in tasks])
    return statistics.fmean(float(row.sum().exp()) for row in found)


def make_teacher(tasks: list[dict[str, Any]], steps: int = 250) -> Any:
    model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        part = [tasks[(step * TAUGHT + i) % len(tasks)] for i in range(TAUGHT)]
        loss = -torch.cat(logprobs_of(model, [(prompt_of(t), answer_of(t)) for t in part])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
    return model


def make_student(seed: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.3 * parameter.std() * torch.randn_like(parameter)
    return model


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def sample(model: Any, tasks: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    prompts = [prompt_of(task) for task in tasks]  # all of one length
    output = model.generate(
        torch.tensor(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=ANSWER,
        pad_token_id=TOKENIZER.eos_token_id,
    )
    rows = []
    for prompt, ids in zip(prompts, output[:, len(prompts[0]) :].tolist(), strict=True):
        end = ids.index(TOKENIZER.eos_token_id) + 1 if TOKENIZER.eos_token_id in ids else len(ids)
        rows.append((prompt, ids[:end]))
    return rows


def learn(student: str, teacher_path: str, teacher: Any, options: dict[str, Any], args: Any) -> list[float]:
    """Return the accuracies before the first step and after each."""
    train, val = additions(0)
    whole = "divergence" in options
    settings = PolicySettings(adv_estimator="opd", gamma=0.0, lr=args.lr, max_logprob_mismatch=1e6, **options)
    settings = settings.with_local_teachers([teacher_path] if whole else [])
    policy = Policy(student, LearnerConfig(), settings, total_steps=args.steps)
    model = policy.engine.module
    found = [accuracy(model, val)]
    for step in range(args.steps):
        rows = sample(model, train[step * args.rows : (step + 1) * args.rows])
        with torch.no_grad():
            own, judged = logprobs_of(model, rows), logprobs_of(teacher, rows)
        trajectories = [
            Trajectory(
                str(i),
                p + a,
                [0] * len(p) + [1] * len(a),
                [0.0] * len(p) + lp.tolist(),
                [-1] * len(p) + [step] * len(a),
            )
            for i, ((p, a), lp) in enumerate(zip(rows, own, strict=True))
        ]
        scores = None if whole else [row.numpy() for row in judged]
        numbers = list(range(len(rows)))
        groups = [str(i // 4) for i in numbers]
        policy.update(TrainBatch([0.0] * len(rows), groups, trajectories, numbers, teacher_logprobs=scores))
        found.append(accuracy(model, val))
    return found


def main(args: argparse.Namespace) -> None:
    train, val = additions(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        join_ranks(folder / "rendezvous")
        torch.manual_seed(0)
        teacher = make_teacher(train)
        teacher_path = save(teacher, folder / "teacher")
        print(f"teacher: {accuracy(teacher, val):.3f}", flush=True)
        for title, options in DIVERGENCES.items():
            curves = []
            for seed in range(args.seeds):
                student = save(make_student(seed), folder / f"student-{seed}")
                torch.manual_seed(seed)
                curves.append(learn(student, teacher_path, teacher, options, args))
            steps = [next((i for i, a in enumerate(c) if a >= args.aim), None) for c in curves]
            print(f"{title}: steps to {args.aim}: {steps}", flush=True)
            for curve in curves:
                print("   ", " ".join(f"{a:.2f}" for a in curve), flush=True)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--aim", type=float, default=0.6)
    main(parser.parse_args())
