"""Evaluate or improve an agent that designs process flowsheets.

    python examples/process_agent/train.py --model NAME --endpoint https://.../v1 --algorithm baseline --mode
    dev python examples/process_agent/train.py --model NAME --endpoint https://.../v1 --algorithm prompt_opt
    --use-validation --use-test python examples/process_agent/train.py --model path/to/model --debug

Without --endpoint, `raylight serve` serves the model on this machine. The key of an endpoint is read from
OPENAI_API_KEY. SIMULATOR_URL is the URL of a running simulator; without it, a local one is started for the
run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.process_agent.algorithms import PROMPT, DesignBaseline, PromptOptimiser
from examples.process_agent.design_tasks import load_tasks
from examples.process_agent.designer import design
from examples.process_agent.flowsheets.local import SimulatorUnavailableError, simulator
from examples.process_agent.served_model import served

logger = logging.getLogger("process_agent")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a model, or its name at --endpoint")
    parser.add_argument(
        "--endpoint", help="base URL of an OpenAI-compatible API with the model, ending in /v1"
    )
    parser.add_argument(
        "--writer-model", help="model at --endpoint that writes prompts for prompt_opt; default: --model"
    )
    parser.add_argument("--algorithm", choices=("baseline", "prompt_opt"), default="baseline")
    parser.add_argument(
        "--mode",
        choices=("dev", "train"),
        default="train",
        help="dev uses 3 tasks, and works with baseline only",
    )
    parser.add_argument("--n-runners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of prompt_opt")
    parser.add_argument("--candidates", type=int, default=2, help="new prompts per round of prompt_opt")
    parser.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature of the agent's model; default: the API's",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=16384,
        help="without --endpoint: maximum length of a conversation, in tokens",
    )
    parser.add_argument(
        "--serve-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="without --endpoint: an argument of the engine, such as tool_parser=hermes; repeatable",
    )
    parser.add_argument(
        "--use-validation", action="store_true", help="evaluate, or select prompts, on the validation tasks"
    )
    parser.add_argument("--use-test", action="store_true", help="evaluate the result on the test tasks")
    parser.add_argument("--debug", action="store_true", help="run one task and print its full trace")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/process_agent"))
    args = parser.parse_args(arguments)
    if args.algorithm == "prompt_opt" and (args.mode == "dev" or args.debug):
        parser.error(
            "prompt_opt is not a fast algorithm: use --mode train without --debug, or --algorithm baseline"
        )
    if args.rounds < 0 or args.candidates < 1:
        parser.error("--rounds must be at least 0, and --candidates at least 1")
    return args


def log_to(folder: Path) -> None:
    """Log to `training.log` in a folder, and to the console."""
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [
        logging.FileHandler(folder / "training.log", mode="w"),
        logging.StreamHandler(sys.stdout),
    ]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def make_trainer(
    args: argparse.Namespace, algorithm: rl.Algorithm, resources: dict[str, Any], name: str
) -> rl.Trainer:
    return rl.Trainer(
        algorithm=algorithm,
        agent=design,
        initial_resources=resources,
        n_runners=args.n_runners,
        progress=False,
        output_dir=args.output_dir / name,
    )


def debug(args: argparse.Namespace, resources: dict[str, Any]) -> None:
    """Run one task and print its full trace."""
    make_trainer(args, DesignBaseline(), resources, "debug").dev(train_dataset=load_tasks("train")[:1])
    rl.print_traces(args.output_dir / "debug", full=True)


def baseline(args: argparse.Namespace, resources: dict[str, Any]) -> dict[str, Any]:
    algorithm = DesignBaseline()
    trainer = make_trainer(args, algorithm, resources, "baseline")
    train, val = load_tasks("train"), load_tasks("val") if args.use_validation else None
    if args.mode == "dev":
        trainer.dev(
            train_dataset=[
                next(t for t in train if t["difficulty"] == d) for d in ("easy", "medium", "hard")
            ],
            val_dataset=val,
        )
    else:
        trainer.fit(train_dataset=train, val_dataset=val)
    return {"scores": algorithm.scores}


def prompt_opt(args: argparse.Namespace, resources: dict[str, Any], llm: rl.LLM) -> dict[str, Any]:
    """Optimise the prompt, write it to `best_prompt.txt` and put it into the resources."""
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    writer = args.writer_model or llm.model
    algorithm = PromptOptimiser(client, writer, rounds=args.rounds, candidates=args.candidates)
    val = load_tasks("val") if args.use_validation else None
    make_trainer(args, algorithm, resources, "prompt_opt").fit(
        train_dataset=load_tasks("train"), val_dataset=val
    )
    best = algorithm.best
    resources[PROMPT] = rl.PromptTemplate(template=best.text)
    (args.output_dir / "best_prompt.txt").write_text(best.text)
    return {
        "first": algorithm.history[0].score,
        "best": best.score,
        "prompts": [one.as_json() for one in algorithm.history],
    }


def measure_test(args: argparse.Namespace, resources: dict[str, Any]) -> dict[str, float]:
    """Evaluate the result of the run on the test tasks."""
    algorithm = DesignBaseline()
    logger.info("the test tasks")
    make_trainer(args, algorithm, resources, "test").fit(val_dataset=load_tasks("test"))
    return algorithm.scores["val"]


def run(args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    url = stack.enter_context(simulator())
    llm = rl.LLM(
        endpoint=args.endpoint or "",
        model=args.model,
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
        traced=True,
    )
    if not args.endpoint:
        llm = stack.enter_context(
            served(args.model, args.max_model_len, args.serve_arg, args.output_dir / "serve.log")
        )
    if args.temperature is not None:
        llm.sampling_parameters["temperature"] = args.temperature
    logger.info("%s, simulator at %s", args.model, url)
    resources: dict[str, Any] = {"llm": llm, "simulator": url, PROMPT: design.declared_resources[PROMPT]}
    if args.debug:
        debug(args, resources)
        return
    report = baseline(args, resources) if args.algorithm == "baseline" else prompt_opt(args, resources, llm)
    if args.use_test:
        report["test"] = measure_test(args, resources)
    (args.output_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    logger.info("done; see %s", args.output_dir)


def main() -> None:
    args = parse()
    log_to(args.output_dir)
    try:
        with contextlib.ExitStack() as stack:
            run(args, stack)
    except (rl.RaylightError, SimulatorUnavailableError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        sys.exit(1)


if __name__ == "__main__":
    main()
