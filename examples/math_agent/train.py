"""Train an agent that solves word problems with a calculator.

python examples/math_agent/train.py                 a tiny model that is made here, on a CPU
python examples/math_agent/train.py --model PATH    another model, and the questions of data/

Run it from the repository's root. On a cluster: ray job submit --working-dir . -- python
examples/math_agent/train.py ...
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.math_agent.agent import math_agent
from examples.math_agent.clients import CLIENTS, find_client
from examples.math_agent.config import DATA, ExtractorName, MathSettings
from examples.math_agent.demonstrations import demonstrate, questions
from examples.starter_models.make import recipe_model
from raylight.trainer.spec.task_files import read_tasks

TASKS_PER_STEP, GROUP_SIZE, VALIDATION_TASKS = 8, 8, 64
TAUGHT_STEPS = 600


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder or name of a model that calls tools; left out: a tiny one is made"
    )
    parser.add_argument(
        "--client", choices=list(CLIENTS), default="openai", help="client library of the agent"
    )
    parser.add_argument(
        "--extractor", choices=get_args(ExtractorName), default="hashes", help="format of the answer"
    )
    parser.add_argument(
        "--mcp-command",
        type=shlex.split,
        help="command of another MCP server over stdio, such as 'uvx mcp-server-calculator'",
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="with --model: folder with train.jsonl and val.jsonl"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--n-runners", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/math_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    return parser.parse_args(arguments)


def read_questions(path: Path) -> list[Any]:
    """Read the tasks of a file.

    Raises:
        rl.errors.DatasetError: the file cannot be read, or a task lacks `question` or `result`.
    """
    tasks = read_tasks(path)
    for place, task in enumerate(tasks, 1):
        if not isinstance(task, dict) or not all(
            isinstance(task.get(key), str) for key in ("question", "result")
        ):
            raise rl.errors.DatasetError(
                f"{path}: task {place} needs the strings question and result, such as "
                f'"result": "42"; it is {task!r:.100}'
            )
    return tasks


def make_tasks(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Return questions to train on, and others that validate."""
    if args.model:
        return read_questions(args.data / "train.jsonl"), read_questions(args.data / "val.jsonl")
    return questions(TASKS_PER_STEP * args.steps, args.seed + 1), questions(VALIDATION_TASKS, 0)


def run(args: argparse.Namespace) -> None:
    """Train the model.

    Raises:
        rl.errors.RaylightError: the run failed; the message has the reason.
    """
    find_client(args.client)  # raise early if the library is missing
    settings = MathSettings(
        client=args.client, extractor=args.extractor, mcp_command=args.mcp_command or None
    )
    train, val = make_tasks(args)
    model = args.model or recipe_model(
        demonstrate,
        args.output_dir / "initial",
        options={"extractor": args.extractor},
        steps=TAUGHT_STEPS,
        batch_tokens=2048,
        seed=args.seed,
    )
    algorithm = rl.GRPO(
        model=model,
        n_steps=args.steps,
        tasks_per_step=TASKS_PER_STEP,
        group_size=GROUP_SIZE,
        lr=1e-6 if args.model else 5e-4,
        val_every=max(args.steps // 2, 1),
    )
    no_gpu: dict[str, Any] = {"num_gpus": 0} if args.cpu else {}
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=no_gpu,
        learner=no_gpu,
        n_runners=args.n_runners,
        output_dir=args.output_dir,
        seed=args.seed,
        tracer=rl.traces.AgentFrameworkTracer() if args.client == "agent_framework" else rl.OtelTracer(),
        initial_resources={"settings": settings.model_dump()},
    )
    trainer.fit(math_agent, train, val_dataset=val)


def main(arguments: list[str] | None = None) -> None:
    try:
        run(parse(arguments))
    except rl.errors.RaylightError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
