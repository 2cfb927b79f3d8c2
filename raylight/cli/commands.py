"""The command line: `raylight quickstart`, `train`, `plan`, `eval`, `serve`, `tinker`, `runner`, `ui`,
`scale`, `trace`, `export`, `export-traces`, `grafana`, `examples` and `doctor`.

A flag has the same spelling in every command. `--set NAME=VALUE` sets what has no flag: NAME
is the dotted name of a setting, VALUE is read as YAML.
"""

from __future__ import annotations

import functools
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from raylight.cli.examples import examples
from raylight.cli.options import (
    DATA,
    ENGINE,
    MODEL,
    RUNNERS,
    TASKS,
    Address,
    AgentName,
    Assignments,
    Engine,
    Port,
    Runners,
    Ui,
    apply_assignments,
    import_from_here,
)
from raylight.cli.runs import export, export_traces_command, grafana, scale, trace, ui_command
from raylight.cli.serve import serve
from raylight.cli.tinker import tinker
from raylight.errors import RaylightError
from raylight.types import JsonObject

app = typer.Typer(
    help="Train existing AI agents with reinforcement learning on Ray.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="The run directory.")] = Path("outputs/quickstart"),
    steps: Annotated[int, typer.Option(min=0, help="Training steps of 16 tasks with 8 rollouts each.")] = 25,
    seed: Annotated[int, typer.Option(help="Seed of the task order and of sampling.")] = 0,
    max_staleness: Annotated[
        int,
        typer.Option(min=0, help="Age in updates of the oldest weights that sample; above 0, asynchronous."),
    ] = 0,
    n_learners: Annotated[int, typer.Option(min=1, help="Number of learner ranks (FSDP2).")] = 1,
    n_runners: Runners = 2,
    port: Port = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder; the packaged starter model by default.")
    ] = None,
    engine: Engine = "auto",
    tools: Annotated[
        bool,
        typer.Option("--tools", help="Train an agent that adds with a tool, and the packaged model for it."),
    ] = False,
    ui: Ui = False,
    loggers: Annotated[
        list[str] | None,
        typer.Option(
            "--logger", help="A tracker in addition to the run's files, such as wandb; may be repeated."
        ),
    ] = None,
    address: Address = None,
) -> None:
    """Train a small model to add two numbers: offline, on a CPU, in about a minute."""
    import raylight as rl
    from raylight.quickstart import STARTER_MODEL, TOOL_MODEL
    from raylight.quickstart.additions import additions
    from raylight.quickstart.agent import adder
    from raylight.quickstart.calculator import calculator

    train_tasks, val_tasks = additions(seed)
    algorithm = rl.GRPO(
        model=model or (TOOL_MODEL if tools else STARTER_MODEL),
        n_steps=steps,
        lr=2e-4,
        max_staleness=max_staleness,
        val_every=5,
        val_samples=2,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=n_runners,
        n_learners=n_learners,
        port=port,
        output_dir=output_dir,
        seed=seed,
        address=address,
        ui=ui,
        engine={"kind": engine},
        loggers=["console", "jsonl", "plot", *(loggers or ())],
    )
    trainer.fit(calculator if tools else adder, train_tasks, val_dataset=val_tasks)


@app.command()
def train(
    source: Annotated[
        str,
        typer.Argument(
            help="The agent, package.module:agent or path/to/file.py:agent; or a run file (YAML), such as a "
            "run's config.yaml.",
            metavar="AGENT|CONFIG",
        ),
    ],
    model: Annotated[str | None, MODEL] = None,
    data: Annotated[str | None, DATA] = None,
    val: Annotated[
        str | None, typer.Option(help="Tasks for evaluation, in the same forms as --data.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="GRPO by default; another public name, or a dotted name.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Training steps; by default one pass over the tasks.")
    ] = None,
    engine: Annotated[str | None, ENGINE] = None,
    n_runners: Annotated[int | None, RUNNERS] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the task order and of sampling.")] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="The run directory; a new one under outputs/ by default.")
    ] = None,
    assignments: Assignments = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved run file and exit, without Ray.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in output_dir if it has a training state.")
    ] = False,
    resume_from: Annotated[
        str | None, typer.Option(help="Continue from this training state or run directory.")
    ] = None,
    ui: Ui = False,
    address: Address = None,
) -> None:
    """Train an agent: `raylight train AGENT --model MODEL --data TASKS`, or with the settings of a file.

    The config.yaml of a run starts the same run again. --set takes the dotted name of any setting of such a
    file, such as algorithm.lr=1e-5 or learner.n=2. Options override a file's settings, and --set overrides
    both.
    """
    import yaml

    import raylight as rl
    from raylight.trainer.spec.run_file import load_run_file

    import_from_here()
    options = {
        "algorithm.name": algorithm,
        "algorithm.model": model,
        "algorithm.n_steps": steps,
        "data.train": data,
        "data.val": val,
        "engine.kind": engine,
        "runner.n": n_runners,
        "seed": seed,
        "output_dir": output_dir,
        "ui": ui or None,
        "address": address,
    }
    run_file = load_run_file(source, assignments or (), options)
    if print_config:
        print(yaml.safe_dump(run_file.resolved(), sort_keys=False), end="")
        return
    trainer = rl.Trainer(**run_file.trainer_arguments())
    train_tasks, val_tasks = run_file.read_data()
    trainer.fit(
        train_dataset=train_tasks,
        val_dataset=val_tasks,
        resume=resume_from if resume_from is not None else "auto" if resume else False,
    )


@app.command()
def plan(
    config: Annotated[
        Path, typer.Argument(help="Run file (YAML), such as a run's config.yaml.", metavar="CONFIG")
    ],
    assignments: Assignments = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines of the cluster; 1 by default.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of each machine; this machine's by default.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of each GPU, in GiB; this machine's by default.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of each machine, in GiB; this machine's by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute the memory that each role of a run needs. Exits with code 1 if the run does not fit.

    For another cluster than this machine: --nodes 2 --gpus 8 --gpu-memory 80 --memory 512.
    """
    from raylight.trainer.cluster_fit.cluster_settings import plan_settings
    from raylight.trainer.cluster_fit.cluster_shape import given_cluster
    from raylight.trainer.cluster_fit.plan_report import print_json, print_plan
    from raylight.trainer.spec.run_file import load_run_file, planned_trainer

    run_file = load_run_file(config, assignments or ())
    trainer = planned_trainer(run_file, functools.partial(print, file=sys.stderr))
    cluster = given_cluster(nodes, gpus, gpu_memory, memory)
    settings = trainer.run_settings, trainer.runner
    found = plan_settings(trainer.algorithm, *settings, cluster, trainer.group_reward)
    (print_json if as_json else print_plan)(found)
    if found.shortages:
        sys.exit(1)


@app.command("eval")
def evaluate(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="A benchmark, such as gsm8k; or an agent, package.module:agent or path/to/file.py:agent; or "
            "with --compare the directories of evaluations. Without any, the benchmarks are listed.",
            metavar="[BENCHMARK|AGENT|DIRECTORY]...",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, MODEL] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=f"Tasks of an agent: {TASKS} Of a benchmark: a folder with the files of its data set, or a "
            "file of its rows; by default the Hugging Face hub."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print a table of evaluations and their differences.")
    ] = False,
    lora_adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of a LoRA adapter in peft's format, served with the model; for each of several "
            "models NAME=FOLDER."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts per task; 1 by default.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many tasks from the start.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Value in llm.sampling_parameters; by default the benchmark's, or unset for an agent."
        ),
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="As --temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="As --temperature.")] = None,
    failure_reward: Annotated[
        float | None, typer.Option(help="Reward of a rollout whose agent failed. Default: 0, or the lowest.")
    ] = None,
    pass_reward: Annotated[
        float, typer.Option(help="Lowest reward with which a rollout passes, for pass@k.")
    ] = 1.0,
    engine: Engine = "auto",
    n_runners: Runners = 2,
    sandbox: Annotated[
        str,
        typer.Option(
            help="Place in which humaneval runs code of the model: bubblewrap, or process, which "
            "protects nothing."
        ),
    ] = "bubblewrap",
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder for the eval.* files; a new one under outputs/ by default.")
    ] = None,
    address: Address = None,
    assignments: Assignments = None,
) -> None:
    """Score a model on a benchmark, or with an agent on tasks: mean and error of each reward, pass@k.

    Nothing is trained. --set takes engine.NAME, runner.NAME, store.NAME and rollout.NAME.
    """
    import raylight as rl
    from raylight.benchmarks.agent import BenchmarkAgent
    from raylight.benchmarks.catalogue import find_benchmark, print_catalogue, print_published
    from raylight.benchmarks.data_sets import read_rows
    from raylight.errors import ConfigError
    from raylight.trainer.output.displays.tables import print_comparison
    from raylight.trainer.output.eval_comparison import read_evaluation
    from raylight.trainer.spec.run_file import read_data

    if not sources:
        if compare or model is not None or data is not None:
            raise ConfigError(
                "eval needs a benchmark or an agent, and --compare the directories of evaluations; `raylight "
                "eval` alone lists the benchmarks"
            )
        print_catalogue()
        return
    if compare:
        print_comparison([read_evaluation(Path(source)) for source in sources])
        return
    source = sources[0]
    benchmark = find_benchmark(source) if source.isidentifier() else None
    if len(sources) > 1:
        raise ConfigError(f"eval takes one benchmark or agent, not {len(sources)}; --compare takes several")
    if model is None or (data is None and benchmark is None):
        raise ConfigError(f"{source}: --{'model' if model is None else 'data'} is missing; see --help")
    import_from_here()
    agent: object = BenchmarkAgent(source, sandbox) if benchmark else source
    tasks = read_rows(benchmark, data, limit) if benchmark else read_data(str(data), "--data", limit)
    settings: JsonObject = {
        "engine": {} if engine == "auto" else {"kind": engine},
        "runner": {"n": n_runners},
        "store": {},
        "rollout": {},
    }
    apply_assignments(assignments, settings)
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    sampling = benchmark.sampling_parameters if benchmark else {}
    sampling |= {name: value for name, value in given.items() if value is not None}
    rollout = {"rollout": {"timeout_seconds": 600.0} | settings["rollout"]} if settings["rollout"] else {}
    trainer = rl.Trainer(
        engine=settings["engine"],
        runner=settings["runner"],
        store=settings["store"],
        output_dir=output_dir,
        seed=seed,
        address=address,
    )
    trainer.evaluate(
        agent,
        tasks,
        model=model,
        lora_adapter=_adapters(lora_adapter or []),
        samples=samples or (benchmark.samples if benchmark else 1),
        failure_reward=failure_reward,
        pass_reward=pass_reward,
        sampling=sampling,
        **rollout,
    )
    if benchmark:
        print_published(benchmark)


def _adapters(given: list[str]) -> str | dict[str, str] | None:
    """Return the folder of an adapter, or of several by name.

    Raises:
        ConfigError: there are several, and one has no name.
    """
    from raylight.algorithms.policy import MODEL_ID
    from raylight.errors import ConfigError

    parts = [one.partition("=") for one in given if not Path(one).expanduser().is_dir()]
    named = {name: folder for name, found, folder in parts if found and MODEL_ID.fullmatch(name)}
    if len(named) == len(given):
        return named or None
    if len(given) > 1:
        raise ConfigError("--lora-adapter: give each of several adapters a name: NAME=FOLDER")
    return given[0]


app.command()(serve)
app.command()(tinker)


@app.command()
def runner(
    agent: AgentName,
    run: Annotated[
        str,
        typer.Option(envvar="RAYLIGHT_RUN", help="Name of the run, whose algorithm is in another process."),
    ],
    n_runners: Runners = 1,
    max_rollouts: Annotated[
        int | None, typer.Option(min=1, help="Number of rollouts after which a runner ends.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for a run that has not started yet.")
    ] = 60.0,
    address: Address = None,
) -> None:
    """Execute rollouts of a run on the cluster, until the run ends."""
    import raylight as rl

    import_from_here()
    settings = {"n": n_runners, "max_rollouts": max_rollouts, "start_timeout_s": wait}
    rl.Trainer(role="runner", run_name=run, runner=settings, address=address).fit(agent)


app.command("ui")(ui_command)
app.command("export-traces")(export_traces_command)
for _command in (scale, trace, export, grafana, examples):
    app.command()(_command)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Model folder or name, to examine it too.")] = None,
    address: Address = None,
    clean: Annotated[bool, typer.Option("--clean", help="Only remove what ended runs left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the resources and versions of this machine and the cluster, and what is missing.

    With --model, also the context length, tool calls and reasoning as the engines read them. With --clean,
    only list and remove what ended runs left here: HAProxy's processes and folders, Ray sessions with logs.
    """
    from raylight.doctor import report

    if clean:
        report.clean(as_json, {"--model": model, "--address": address})
    report.examine(model, address, as_json)


def main() -> None:
    """Run the command line; a typed error becomes one message and exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log or a pipe shows each line at once
    try:
        app()
    except RaylightError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
