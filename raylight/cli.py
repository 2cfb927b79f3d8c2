"""The command line: `raylight quickstart`, `eval`, `serve`, `runner`, `trace`, `export` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from raylight.errors import RaylightError

app = typer.Typer(
    help="Train existing AI agents with reinforcement learning on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Dtype(StrEnum):
    """Values of `--dtype`."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class EngineName(StrEnum):
    """Values of `--engine`."""

    auto = "auto"
    transformers = "transformers"
    vllm = "vllm"
    upstream = "upstream"


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Where the run's files go.")] = Path("outputs/quickstart"),
    steps: Annotated[int, typer.Option(min=0, help="Training steps of 16 tasks with 8 rollouts each.")] = 25,
    seed: Annotated[int, typer.Option(help="Of task order and sampling.")] = 0,
    learners: Annotated[int, typer.Option(min=1, help="Learner ranks (FSDP2).")] = 1,
    runners: Annotated[int, typer.Option(min=1, help="Runner actors that execute the agent.")] = 2,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port of the model; a free one by default.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another model folder than the starter model.")] = None,
    engine: Annotated[EngineName, typer.Option(help="What samples.")] = EngineName.auto,
) -> None:
    """Watch a small model learn to add: offline, on a CPU, in about a minute."""
    import raylight as rl
    from raylight.quickstart import STARTER_MODEL
    from raylight.quickstart.additions import additions
    from raylight.quickstart.agent import adder

    train, val = additions(seed)
    algorithm = rl.GRPO(
        model=model or STARTER_MODEL, n_steps=steps, lr=2e-4, kl_coef=1e-3, val_every=5, val_samples=2
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=runners,
        n_learners=learners,
        port=port,
        output_dir=output_dir,
        seed=seed,
        engine={"kind": engine.value},
    )
    trainer.fit(adder, train, val_dataset=val)


@app.command("eval")
def evaluate(
    agent: Annotated[
        str, typer.Argument(help="The agent's dotted name, package.module:agent.", metavar="AGENT")
    ],
    model: Annotated[
        str,
        typer.Option(help="Model folder, its name in the local Hugging Face cache, or the upstream's name."),
    ],
    data: Annotated[Path, typer.Option(help="Tasks: a .jsonl, .json or .parquet file.")],
    adapter: Annotated[
        str | None, typer.Option(help="Folder of a LoRA adapter (peft) to serve the model with.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="In llm.sampling_parameters; the agent's own otherwise.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="The same.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The same.")] = None,
    failure_reward: Annotated[
        float | None, typer.Option(help="Reward where the agent failed; left out by default.")
    ] = None,
    pass_reward: Annotated[float, typer.Option(help="Reward from which a rollout passes, for pass@k.")] = 1.0,
    engine: Annotated[EngineName, typer.Option(help="What samples.")] = EngineName.auto,
    n_runners: Annotated[int, typer.Option(min=1, help="Runner actors that execute the agent.")] = 2,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Where the eval.* files go; a new folder by default.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="engine.NAME=VALUE, runner.NAME=VALUE, store.NAME=VALUE or rollout.NAME=VALUE; repeatable.",
        ),
    ] = None,
) -> None:
    """Score a model with an agent on tasks: mean and error of each reward, pass@k. Trains nothing."""
    import raylight as rl
    from raylight.trainer.data_files import read_tasks

    tasks = read_tasks(data, limit)
    groups: dict[str, dict[str, Any]] = {"engine": {}, "runner": {}, "store": {}, "rollout": {}}
    for text in setting or ():
        group, name, value = _setting(text, groups)
        groups[group][name] = value
    if engine is not EngineName.auto:
        groups["engine"].setdefault("kind", engine.value)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    rollout = {"rollout": {"timeout_seconds": 600.0} | groups["rollout"]} if groups["rollout"] else {}
    sys.path.insert(0, "")  # an agent beside which this is called
    trainer = rl.Trainer(
        engine=groups["engine"],
        runner=groups["runner"] | {"n": n_runners},
        store=groups["store"],
        output_dir=output,
        seed=seed,
    )
    trainer.evaluate(
        agent,
        tasks,
        model=model,
        adapter=adapter,
        samples=samples,
        failure_reward=failure_reward,
        pass_reward=pass_reward,
        sampling={name: value for name, value in sampling.items() if value is not None},
        **rollout,
    )


def _setting(text: str, groups: Iterable[str]) -> tuple[str, str, Any]:
    """Group, name and value of `group.name=value`; the value is read as YAML."""
    import yaml

    dotted, equals, value = text.partition("=")
    group, _, name = dotted.strip().partition(".")
    if not equals or not name or group not in groups:
        raise typer.BadParameter(
            f"--set takes {', '.join(f'{group}.name=value' for group in groups)}, not {text!r}"
        )
    return group, name, yaml.safe_load(value)


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Option(help="Model folder, its name in the local Hugging Face cache, or the upstream's name."),
    ],
    engine: Annotated[
        EngineName, typer.Option(help="What samples; auto picks by what is there.")
    ] = EngineName.auto,
    name: Annotated[str | None, typer.Option(help="Name under which clients ask for the model.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="8000, or a free one, by default.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RAYLIGHT_API_KEY", help="What clients must send.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the engine.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Add copies under load up to this number.")
    ] = None,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs of a replica.")] = 1.0,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs of a replica.")] = 0.0,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the model.")] = Dtype.float32,
    max_model_len: Annotated[
        int, typer.Option(min=8, help="Longest prompt plus response, in tokens.")
    ] = 2048,
    url: Annotated[
        str | None, typer.Option(help="Base URL of an upstream model, which is passed on.")
    ] = None,
    upstream_key: Annotated[str | None, typer.Option(envvar="RAYLIGHT_UPSTREAM_KEY", help="Its key.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="An argument of the engine itself, name=value; may be repeated.")
    ] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that starting may take.")] = 600.0,
) -> None:
    """Serve a model: OpenAI's and Anthropic's APIs, until Ctrl-C."""
    from raylight.config import EngineConfig
    from raylight.trainer.serve import serve_model

    config = EngineConfig.parse(
        {},
        kind=engine.value,
        host=host,
        port=port,
        replicas=replicas,
        max_replicas=max_replicas,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        dtype=dtype.value,
        max_model_len=max_model_len,
        url=url,
        api_key=upstream_key,
        args=dict(_argument(text) for text in arg or ()),
        start_timeout_s=start_timeout,
    )
    serve_model(model, config, name=name, api_key=api_key)


def _argument(text: str) -> tuple[str, Any]:
    """An argument and its value, which is read as YAML: 0.9, true, {a: 1}, or a word."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--arg takes name=value, not {text!r}")
    return name.strip().lstrip("-").replace("-", "_"), yaml.safe_load(value)


@app.command()
def runner(
    agent: Annotated[
        str, typer.Argument(help="The agent's dotted name, package.module:agent.", metavar="AGENT")
    ],
    run: Annotated[
        str,
        typer.Option(envvar="RAYLIGHT_RUN", help="Name of the run, whose algorithm is in another process."),
    ],
    n_runners: Annotated[int, typer.Option(min=1, help="Runner actors that execute the agent.")] = 1,
    max_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Rollouts after which a runner ends.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for a run that has not begun.")
    ] = 60.0,
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster; RAY_ADDRESS or the one here by default.")
    ] = None,
) -> None:
    """Execute the rollouts of a run that is on the cluster, until it is over."""
    import raylight as rl

    sys.path.insert(0, "")  # an agent beside which this is called
    settings = {"n": n_runners, "max_rollouts": max_rollouts, "start_timeout_s": wait}
    rl.Trainer(role="runner", run_name=run, runner=settings, address=address).fit(agent)


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="A run's folder, or the file of its store.", metavar="RUN")],
    rollout: Annotated[list[str] | None, typer.Option(help="A rollout's id; may be repeated.")] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="The last so many; 1 by default, unless rollouts are named.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only rollouts that failed.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every attribute of every span, whole, with the tokens.")
    ] = False,
) -> None:
    """Print what was recorded of rollouts: messages, tools, rewards, failures. The run may be under way."""
    from raylight.trainer.traces import print_traces

    if last is None and not rollout:
        last = 1
    if not print_traces(run, rollout_ids=rollout, failed=failed, last=last, full=full):
        print("no such rollouts")


@app.command()
def export(
    state: Annotated[
        str,
        typer.Argument(
            help="A training state, RUN/state/step-8, or a URL; of RUN/state the last.", metavar="STATE"
        ),
    ],
    output: Annotated[Path, typer.Argument(help="A new folder for the model.", metavar="OUTPUT")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model that training began with; where it was by default."),
    ] = None,
) -> None:
    """Write the model of a training state in Hugging Face format, and an adapter in peft's."""
    from raylight.learner.export import export_state

    export_state(state, output, model)
    print(f"wrote {output}")


@app.command()
def doctor() -> None:
    """Print what this machine and the cluster offer, and what is missing."""
    from raylight.doctor import examine

    examine()


def main() -> None:
    """Run the command line; a typed error becomes one message and exit code 1."""
    try:
        app()
    except RaylightError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
