"""Commands on a run in progress or its records: `raylight ui`, `scale`, `trace`, `export`,
`export-traces`, `grafana`."""

from __future__ import annotations

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from raylight.errors import ConfigError


def ui_command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run directories, or folders of them; by default `outputs`, or the current folder.",
            metavar="RUN",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; by default the first free one from 7860 on.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="RAYLIGHT_UI_KEY", help="Key of visitors; generated if the address is not loopback."
        ),
    ] = None,
    until_closed: Annotated[
        bool, typer.Option("--until-closed", hidden=True, help="End with the standard input.")
    ] = False,
) -> None:
    """Show runs in the browser: curves, rollouts, conversations and tokens, live and afterwards."""
    from raylight.ui.app import serve_ui

    default = Path("outputs")
    paths = runs or [default if default.is_dir() else Path()]
    serve_ui(paths, host=host, port=port, key=key, until_closed=until_closed)


def scale(
    run: Annotated[
        str,
        typer.Argument(help="Name of the run, as the run and the dashboard show it.", metavar="RUN"),
    ],
    runners: Annotated[int | None, typer.Option(min=1, help="Number of runner actors.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Number of engine replicas.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest wait, in seconds.")] = 600.0,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the run's Ray cluster, host:port. By default RAY_ADDRESS, then this machine's "
            "cluster."
        ),
    ] = None,
) -> None:
    """Change the number of runners or engine replicas of a run in progress, and wait until it is reached.

    Runners and replicas that are taken away may finish what they execute (`drain_timeout_s` of `runner` and
    `engine`). No rollout is lost.
    """
    from raylight.trainer.ray_session.scale_run import scale_run

    wanted = {"runners": runners, "replicas": replicas}
    sizes = {name: n for name, n in wanted.items() if n is not None}
    if not sizes:
        raise ConfigError("nothing to scale: give --runners N, --replicas N, or both")
    scale_run(run, sizes, address, timeout)


def trace(
    run: Annotated[Path, typer.Argument(help="Run directory, or the file of its store.", metavar="RUN")],
    rollout: Annotated[list[str] | None, typer.Option(help="Id of a rollout; may be repeated.")] = None,
    last: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of rollouts from the end; 1 by default, all of those that are named."
        ),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only rollouts that failed.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All attributes of all spans, without cuts, with the tokens.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line and rollout, with its calls.")
    ] = False,
) -> None:
    """Print recorded rollouts: messages, tools, rewards, failures, and for each call its relation to earlier
    calls and the origins of its prompt's tokens. The run may still be in progress."""
    from raylight.trainer.output.run_records import print_traces

    if last is None and not rollout:
        last = 1
    count = print_traces(run, rollout_ids=rollout, failed=failed, last=last, full=full, as_json=as_json)
    if not count and not as_json:
        print("no rollout matches")


def export(
    state: Annotated[
        str,
        typer.Argument(
            help="Training state: RUN/state/step-8, RUN/state for the last one, or a URL.", metavar="STATE"
        ),
    ],
    output: Annotated[Path, typer.Argument(help="New folder for the model.", metavar="OUTPUT")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the initial model of the run; its original path by default."),
    ] = None,
) -> None:
    """Write the model of a training state in Hugging Face format, and its adapter in peft's."""
    from raylight.learner.state.export import export_state

    export_state(state, output, model)
    print(f"wrote {output}")


TraceFormat = StrEnum("TraceFormat", ["sft", "dpo", "messages", "jsonl"])
"""Values of `--format`."""
Split = StrEnum("Split", ["train", "val", "test", "all"])
"""Values of `--split`."""


def export_traces_command(
    run: Annotated[Path, typer.Argument(help="Run directory, or the file of a store.", metavar="RUN")],
    format: Annotated[
        TraceFormat,
        typer.Option(
            help="sft: messages and tools; dpo: pairs of a group; messages: with rewards; jsonl: also the "
            "token ids, log-probs and masks."
        ),
    ] = TraceFormat.sft,
    min_reward: Annotated[
        float | None, typer.Option(help="Smallest reward; of a pair, the chosen rollout's.")
    ] = None,
    best_of_group: Annotated[
        bool, typer.Option("--best-of-group", help="Only the best rollout of each group.")
    ] = False,
    split: Annotated[Split, typer.Option(help="Mode of the rollouts.")] = Split.train,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write; by default the lines are printed.")
    ] = None,
) -> None:
    """Write the rollouts of a run as training data, one JSON object per line. The run may still be in
    progress.

    rl.SFT and rl.DPO, TRL and OpenAI's fine-tuning read the files; rl.SFT and rl.DPO also read RUN itself.
    """
    from raylight._utils.files import atomic_file
    from raylight._utils.machine import check_writable
    from raylight.experience.trajectories.rollout_selection import RolloutSelection
    from raylight.trainer.output.trace_export import PAIRED, export_traces

    if format == PAIRED and best_of_group:
        raise ConfigError("nothing reads --best-of-group: a pair has the best rollout of a group already")
    if output is not None:
        check_writable(output.parent, "the folder")
        output.parent.mkdir(parents=True, exist_ok=True)
    selection = RolloutSelection(split.value, min_reward, best_of_group)
    with contextlib.ExitStack() as stack:
        file = sys.stdout.buffer if output is None else stack.enter_context(atomic_file(output))
        counts = export_traces(run, format.value, selection, file)
    left_out = f", {counts.left_out} of {counts.selected} left out" if counts.left_out else ""
    rows = f", {counts.rows_left_out} other rows without messages" if counts.rows_left_out else ""
    print(f"{counts.written} lines{left_out}{rows}", file=sys.stderr)
    if counts.below_best:
        print(
            f"note: {counts.below_best} of {counts.selected} rollouts have a lower reward than the best of "
            f"their group, and are written too; --min-reward {counts.best_reward!r} writes those with the "
            "highest reward only, --best-of-group the best of each group",
            file=sys.stderr,
        )


def grafana() -> None:
    """Print Grafana's board of raylight's metrics, for its import: `raylight grafana > board.json`.

    A cluster that a run starts has it among Ray's own boards.
    """
    from raylight.ray_metrics.table import BOARD

    print(BOARD.read_text(), end="")
