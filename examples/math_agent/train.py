"""Train, score or debug the math agent.

    python examples/math_agent/train.py --model Qwen/Qwen2.5-1.5B-Instruct            train (GRPO, the VERL
    dict of config.py) python examples/math_agent/train.py --model NAME --endpoint https://host/v1       score
    a model that is served elsewhere python examples/math_agent/train.py --model PATH --debug
    one question, with its full trace python examples/math_agent/train.py --fast
    2 small steps of a tiny model, on a CPU

Run it from the repository's root. On a cluster: ray job submit --working-dir . -- python
examples/math_agent/train.py ...
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.math_agent.agent import math_agent
from examples.math_agent.clients import CLIENTS, find_client
from examples.math_agent.config import DATA, ExtractorName, MathSettings, shortened, verl_config
from examples.math_agent.starter import make_starter
from raylight.trainer.spec.task_files import read_tasks

FAST_STEPS = 2
STARTER = Path("outputs/math_agent/starter")
SAMPLING = {"temperature": 0.7, "max_tokens": 1024}
"""Sampling parameters for scoring; those of training are in config.py."""


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    try:
        run(args)
    except rl.errors.RaylightError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, score or look at an agent that calculates.")
    parser.add_argument(
        "--model",
        help="folder or name of a model that calls tools; with --endpoint, its name at the endpoint",
    )
    parser.add_argument(
        "--client", choices=list(CLIENTS), default="openai", help="client library of the agent"
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="score a model at this OpenAI-compatible URL; its key is in OPENAI_API_KEY",
    )
    parser.add_argument(
        "--debug", action="store_true", help="run one question and print its full trace, without training"
    )
    parser.add_argument(
        "--fast",
        "--ci",
        action="store_true",
        help=f"{FAST_STEPS} small steps, or 2 questions, as a test run",
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
        "--engine",
        choices=["auto", "vllm", "transformers"],
        default="auto",
        help="auto: vLLM if this machine has a GPU and vLLM, else transformers",
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with train.jsonl, val.jsonl and test.jsonl"
    )
    parser.add_argument("--n-runners", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, help="default: a new folder in outputs/")
    args = parser.parse_args(arguments)
    if args.model is None and (not args.fast or args.endpoint):
        parser.error("--model is missing; only --fast goes without, with a tiny model that adds")
    return args


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        rl.errors.RaylightError: the run failed; the message has the reason.
    """
    find_client(args.client)  # raise early if the library is missing
    args.model = args.model or make_starter(STARTER)
    settings = MathSettings(
        client=args.client, extractor=args.extractor, mcp_command=args.mcp_command or None
    )
    if args.debug or args.endpoint:
        score(args, settings)
    else:
        train(args, settings)


def read_questions(path: Path, limit: int | None = None) -> list[Any]:
    """Read the tasks of a file.

    Raises:
        rl.errors.DatasetError: the file cannot be read, or a task lacks `question` or `result`.
    """
    tasks = read_tasks(path, limit)
    for place, task in enumerate(tasks, 1):
        if not isinstance(task, dict) or not all(
            isinstance(task.get(key), str) for key in ("question", "result")
        ):
            raise rl.errors.DatasetError(
                f"{path}: task {place} needs the strings question and result, such as "
                f'"result": "42"; it is {task!r:.100}'
            )
    return tasks


def train(args: argparse.Namespace, settings: MathSettings) -> None:
    """Train the model, and print the summary."""
    config = verl_config(args.model, "vllm" if uses_vllm(args.engine) else "hf")
    tasks, val = (read_questions(args.data / f"{split}.jsonl") for split in ("train", "val"))
    if args.fast:
        config, val = shortened(config, FAST_STEPS), val[:2]
    trainer = rl.Trainer(
        algorithm=rl.VERL(config),
        n_runners=args.n_runners,
        output_dir=args.output_dir,
        tracer=_tracer(settings),
        initial_resources={"settings": settings.model_dump()},
    )
    summary = trainer.fit(math_agent, tasks, val)
    print(json.dumps(summary, indent=2, default=str))


def score(args: argparse.Namespace, settings: MathSettings) -> None:
    """Score the model on the test questions, or print the trace of one question."""
    tasks = read_questions(args.data / "test.jsonl", 1 if args.debug else 2 if args.fast else None)
    folder: Path | None = args.output_dir or (Path("outputs/math_agent/debug") if args.debug else None)
    trainer = rl.Trainer(
        engine=_engine(args),
        n_runners=1 if args.debug else args.n_runners,
        output_dir=folder,
        initial_resources={"settings": settings.model_dump()},
    )
    try:
        trainer.evaluate(math_agent, tasks, model=args.model, sampling=SAMPLING)
    finally:  # a failed rollout has a trace too
        if args.debug and folder and (folder / "eval.db").exists():
            rl.print_traces(folder, last=1, full=True)


def _tracer(settings: MathSettings) -> rl.OtelTracer:
    """The tracer; with agent-framework, one that also collects its spans and their contents."""
    return rl.traces.AgentFrameworkTracer() if settings.client == "agent_framework" else rl.OtelTracer()


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    if args.endpoint:
        return {"kind": "upstream", "url": args.endpoint, "api_key": os.environ.get("OPENAI_API_KEY")}
    if uses_vllm(args.engine):
        return {"kind": "vllm", "num_gpus": 1, "dtype": "bfloat16", "max_model_len": 6144}
    return {"kind": "transformers", "max_model_len": 6144}


def uses_vllm(engine: str) -> bool:
    if engine != "auto":
        return engine == "vllm"
    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


if __name__ == "__main__":
    main()
