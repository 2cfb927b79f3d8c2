"""Connect to Ray, carry out a planned run, print its summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from raylight._utils.disk import disk_errors
from raylight.errors import RaylightError
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.components.run_metrics import StepMetrics
from raylight.trainer.output.displays import make_display
from raylight.trainer.output.displays.tables import print_run, print_summary
from raylight.trainer.output.loggers import Display
from raylight.trainer.output.loggers.registry import find_loggers
from raylight.trainer.output.report import ProgressReporter, Report
from raylight.trainer.output.ui_process import ui_process
from raylight.trainer.ray_session.connection import Connection, ray_session
from raylight.trainer.runs.eval_run import EvalRun
from raylight.trainer.runs.join_run import check_joinable
from raylight.trainer.runs.run_spec import RunSpec
from raylight.trainer.spec.arguments import GivenSettings, TrainerArguments
from raylight.types import JsonObject

Work = Coroutine[object, object, JsonObject]
"""A run from the start of its components to its summary."""


@contextlib.contextmanager
def connected(
    arguments: TrainerArguments, folder: Path, start_timeout_s: float, total_steps: int = 0
) -> Iterator[tuple[Connection, Display]]:
    with (
        disk_errors(folder),
        ray_session(arguments.address, arguments.log_to_driver, start_timeout_s) as connection,
        make_display(arguments.progress, total_steps, folder) as display,
    ):
        yield connection, display


@contextlib.contextmanager
def launched(
    run: RunSpec[Any, Any, Report],
    arguments: TrainerArguments,
    given: GivenSettings,
    loggers: Iterable[object] | None,
) -> Iterator[Work]:
    """Yield the work of a planned run, with a connection to Ray, a display and metric loggers.

    Args:
        arguments: the Trainer's.
        given: what config.yaml is made of.
        loggers: as for `Trainer(loggers=...)`.

    Raises:
        ConfigError: the run's folder or the store's cannot be written.
    """
    started, settings = time.perf_counter(), run.settings
    run.check_folders()
    start_timeout_s = settings.runner.start_timeout_s
    with connected(arguments, run.folder, start_timeout_s, run.total_steps) as (connection, display):
        if settings.runner.external:
            check_joinable(settings.name, connection.owns_cluster)
        notes = run.for_cluster(ClusterFacts())
        run.find_start()
        config = run.config(given)
        config["run"]["dashboard"] = connection.dashboard
        all_loggers = [*find_loggers(loggers), StepMetrics(settings.name)]
        report = Report(run.folder, display, config, started, run.last_logged_step, all_loggers)
        shown: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if arguments.ui:
            shown = ui_process(run.folder, report.note, connection.dashboard)
        with report, shown:
            for note in notes:
                report.note(note)
            report.stage(f"run {settings.name}")
            connection.announce(report.note, report.stage)
            run.prepare_states()
            yield run.work(report, connection.owns_cluster)


@contextlib.contextmanager
def evaluating(run: EvalRun, arguments: TrainerArguments) -> Iterator[Work]:
    """Yield the work of a planned evaluation, with a connection to Ray and a display.

    Args:
        arguments: the Trainer's.
    """
    start_timeout_s = run.settings.runner.start_timeout_s
    with connected(arguments, run.folder, start_timeout_s) as (connection, display):
        progress = ProgressReporter(display)
        progress.stage(f"run {run.settings.name}")
        connection.announce(progress.note, progress.stage)
        for note in run.for_cluster(ClusterFacts()):
            progress.note(note)
        yield run.work(progress, connection.owns_cluster)


def show_summary(run: RunSpec[Any, Any, Any], summary: JsonObject, arguments: TrainerArguments) -> JsonObject:
    """Print the summary of a run, unless its progress is not shown; return it."""
    if arguments.progress:
        (print_summary if run.trains else print_run)(summary, str(run.folder))
    return summary


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Raise raylight's errors without its own frames, which would hide the message."""
    try:
        yield
    except RaylightError as error:
        raise error.with_traceback(None) from None
