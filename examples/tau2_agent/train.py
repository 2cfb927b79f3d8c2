"""Train an assistant that serves a simulated user; the user is not trained.

    python examples/tau2_agent/train.py --steps 3 --cpu                tests the setup
    python examples/tau2_agent/train.py --model path/to/Qwen2.5-1.5B-Instruct
    python examples/tau2_agent/train.py --model PATH --user model --user-endpoint http://localhost:8001/v1
    TAU2_DATA_DIR=path/to/data python examples/tau2_agent/train.py --model PATH --env airline --user model ...
    python examples/tau2_agent/train.py --model PATH --debug           one conversation, in full

Run it from the repository's root. On a cluster: ray job submit --working-dir . -- python
examples/tau2_agent/train.py ... See docs/multi_agent.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.tau2_agent import tiny_model
from examples.tau2_agent.agent import CustomerService
from examples.tau2_agent.domain import ENVIRONMENTS
from examples.tau2_agent.settings import verl_config
from examples.tau2_agent.tasks import Row, load_rows
from raylight.errors import ConfigError, RaylightError

TINY_TASKS = 4
TINY_AGENT = {"max_steps": 3, "max_tokens": 16}
"""Limits of an agent with the tiny model."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an assistant that serves a simulated user.")
    parser.add_argument(
        "--model",
        help="folder or name of a model that calls tools; left out: a tiny one that cannot",
    )
    parser.add_argument("--endpoint", help="with --debug: base URL of a server that serves --model")
    parser.add_argument("--env", choices=ENVIRONMENTS, default="helpdesk")
    parser.add_argument(
        "--user", choices=("scripted", "model"), default="scripted", help="player of the user"
    )
    parser.add_argument(
        "--user-endpoint", help="base URL of the model that plays the user; default: the trained model"
    )
    parser.add_argument("--user-model", help="name of that model; optional if the endpoint has only one")
    parser.add_argument("--task", help="with --debug: id of the task; default: the first one")
    parser.add_argument("--steps", type=int, help="eight epochs by default")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/tau2_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone, with small batches")
    parser.add_argument("--n-runners", type=int, default=2)
    parser.add_argument(
        "--debug", action="store_true", help="hold one conversation and print it in full, without training"
    )
    given = parser.parse_args(arguments)
    check(given)
    return given


def check(given: argparse.Namespace) -> None:
    """Check the arguments before anything starts.

    Raises:
        ConfigError: arguments contradict each other.
    """
    if given.endpoint and given.model is None:
        raise ConfigError("--endpoint has no --model; give the model's name there")
    if given.endpoint and not given.debug:
        raise ConfigError(
            "a model behind an --endpoint cannot be trained; add --debug, or give the --model's folder alone"
        )
    if given.task and not given.debug:
        raise ConfigError("nothing reads --task without --debug")
    if given.user == "scripted" and (given.user_endpoint or given.user_model):
        raise ConfigError(
            "nothing reads --user-endpoint and --user-model while a script plays the user; add --user model"
        )
    if given.user_model and not given.user_endpoint:
        raise ConfigError("--user-model is a name at an endpoint; give --user-endpoint URL too")
    if given.env == "airline" and given.user == "scripted":
        raise ConfigError("the airline's tasks have no script for the user; add --user model")


def user_resource(given: argparse.Namespace) -> dict[str, rl.LLM]:
    """Return the resource `user`: a fixed model at another endpoint, whose calls are recorded.

    The key is read from `USER_API_KEY` or `OPENAI_API_KEY`.

    Raises:
        ConfigError: the endpoint does not respond, or has several models and none was chosen.
    """
    if not given.user_endpoint:
        return {}
    key = os.environ.get("USER_API_KEY") or os.environ.get("OPENAI_API_KEY") or "unused"
    name = given.user_model or only_model(given.user_endpoint, key)
    return {"user": rl.LLM(endpoint=given.user_endpoint, model=name, api_key=key, traced=True)}


def only_model(endpoint: str, key: str) -> str:
    try:
        with OpenAI(base_url=endpoint, api_key=key, max_retries=0, timeout=20) as client:
            names = [model.id for model in client.models.list()]
    except OpenAIError as error:
        raise ConfigError(
            f"the models at {endpoint} cannot be listed ({error}); start the server, or give --user-model"
        ) from None
    if len(names) != 1:
        raise ConfigError(
            f"{endpoint} has {len(names)} models ({', '.join(names[:10])}); choose one by --user-model"
        )
    return names[0]


def show_one(
    given: argparse.Namespace, agent: CustomerService, row: Row, resources: dict[str, rl.LLM]
) -> None:
    """Hold one conversation and print it in full."""
    engine: dict[str, Any] = {"max_model_len": 10240} | ({"num_gpus": 0} if given.cpu else {})
    if given.endpoint:
        engine = {"kind": "upstream", "url": given.endpoint, "api_key": os.environ.get("OPENAI_API_KEY")}
    trainer = rl.Trainer(
        output_dir=given.output_dir,
        engine=engine,
        seed=given.seed,
        initial_resources=resources,
        progress=False,
    )
    trainer.evaluate(agent, [row], model=given.model)
    rl.print_traces(given.output_dir, last=1)


def train(
    given: argparse.Namespace,
    agent: CustomerService,
    rows: tuple[list[Row], list[Row]],
    resources: dict[str, rl.LLM],
    small: bool,
) -> None:
    """Train the assistant."""
    config = verl_config(given.model, given.steps, small or given.cpu, given.cpu)
    trainer = rl.Trainer(
        algorithm=rl.VERL(config),
        n_runners=given.n_runners,
        output_dir=given.output_dir,
        seed=given.seed,
        initial_resources=resources,
    )
    trainer.fit(agent, rows[0], val_dataset=rows[1])


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    train_rows, val_rows = load_rows(given.env)
    resources = user_resource(given)
    small = given.model is None
    if small:
        train_rows, val_rows = train_rows[:TINY_TASKS], val_rows[:TINY_TASKS]
        given.model = tiny_model.build(given.output_dir / "initial")
    agent = CustomerService(user=given.user, **(TINY_AGENT if small else {}))
    if given.debug:
        found = [row for row in train_rows + val_rows if given.task in (None, row["id"])]
        if not found:
            raise ConfigError(
                f"there is no task {given.task!r}; choose one of "
                f"{', '.join(row['id'] for row in train_rows + val_rows)}"
            )
        show_one(given, agent, found[0], resources)
    else:
        train(given, agent, (train_rows, val_rows), resources, small)


if __name__ == "__main__":
    try:
        main()
    except RaylightError as error:
        sys.exit(f"{type(error).__name__}: {error}")
