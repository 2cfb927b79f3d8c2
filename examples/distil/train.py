"""Teach a small model by a larger one, and then by rewards: SFT, on-policy distillation, GRPO.

python examples/distil/train.py                               models that are made here, on a CPU
python examples/distil/train.py --stages sft,grpo             fewer stages
python examples/distil/train.py --model PATH --teacher PATH   other models
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import question, sort_letters
from models import make_models, make_tasks

import raylight as rl
from raylight.trainer.ray_session.connection import ray_session

ANSWERS, VALIDATION_TASKS, TASKS_PER_STEP = 1024, 128, 16
MADE = {"sft": 3e-3, "distil": 2e-4, "grpo": 3e-4}
"""Learning rate of each stage for the student that is made here."""
REAL = {"sft": 1e-5, "distil": 1e-5, "grpo": 1e-6}


def right_answers(scores: Path) -> list[list[dict[str, Any]]]:
    """Return the teacher's right answers of an evaluation, as conversations."""
    rows = map(json.loads, scores.read_text().splitlines())
    return [
        [*question(row["task"]["letters"]), {"role": "assistant", "content": row["text"].strip()}]
        for row in rows
        if row["reward"] == 1
    ]


def algorithm(stage: str, args: argparse.Namespace, model: str, teacher: str) -> Any:
    """Return the algorithm of a stage that trains `model`."""
    lr = (REAL if args.model else MADE)[stage]
    if stage == "sft":
        return rl.SFT(
            model=model,
            data=right_answers(args.output_dir / "answers" / "eval.jsonl"),
            n_epochs=args.epochs,
            batch_size=64,
            lr=lr,
            best=None,
        )
    settings: dict[str, Any] = {
        "model": model,
        "n_steps": args.steps,
        "tasks_per_step": TASKS_PER_STEP,
        "group_size": 8,
        "lr": lr,
        "val_every": 4,
        "val_samples": 2,
    }
    return rl.OPD(teacher=teacher, **settings) if stage == "distil" else rl.GRPO(**settings)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the student; left out: both models are made")
    parser.add_argument("--teacher", help="a larger model with the same tokens")
    parser.add_argument("--stages", default="sft,distil,grpo", help="some of sft,distil,grpo, in this order")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the teacher's answers")
    parser.add_argument("--steps", type=int, default=12, help="steps of distillation, and of GRPO")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/distil"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    stages = args.stages.split(",")
    if not set(stages) <= MADE.keys():
        parser.error(f"--stages {args.stages}: the stages are {', '.join(MADE)}")
    if bool(args.model) != bool(args.teacher):
        parser.error("give both --model and --teacher, or neither")
    model, teacher = args.model, args.teacher
    if model is None:
        teacher, model = make_models(args.output_dir / "initial", args.seed)
    gpus = {"num_gpus": 0} if args.cpu else {}
    rollouts: dict[str, Any] = {"engine": gpus, "n_runners": 1}
    with ray_session(None, log_to_driver=False):  # one cluster for all stages
        if "sft" in stages:
            answers = rl.Trainer(output_dir=args.output_dir / "answers", seed=args.seed, **rollouts)
            answers.evaluate(sort_letters, make_tasks(ANSWERS, 2), model=teacher)
        for number, stage in enumerate(stages, 3):
            trainer = rl.Trainer(
                algorithm=algorithm(stage, args, model, teacher),
                learner=gpus,
                output_dir=args.output_dir / stage,
                seed=args.seed,
                **({} if stage == "sft" else rollouts),
            )
            if stage == "sft":
                trainer.fit()
            else:
                tasks = make_tasks(TASKS_PER_STEP * args.steps, number)
                trainer.fit(sort_letters, tasks, val_dataset=make_tasks(VALIDATION_TASKS, 1))
            model = str(args.output_dir / stage / "checkpoint")


if __name__ == "__main__":
    main()
