"""The way of a planned run from the connection to Ray to its summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from raylight._utils.disk import disk_errors
from raylight._utils.machine import check_writable
from raylight.errors import RaylightError
from raylight.trainer.cluster_fit.cluster_settings import settings_for_cluster
from raylight.trainer.components.run_metrics import StepMetrics
from raylight.trainer.output.displays import make_display
from raylight.trainer.output.displays.tables import print_run, print_summary
from raylight.trainer.output.loggers import Display, find_loggers
from raylight.trainer.output.report import Report
from raylight.trainer.output.ui_process import ui_process
from raylight.trainer.ray_session.connection import Connection, ray_session
from raylight.trainer.runs.join_run import check_joinable
from raylight.trainer.runs.run_plan import Fit
from raylight.trainer.runs.work import run_algorithm, train_policy, train_supervised
from raylight.trainer.spec.arguments import TrainerArguments
from raylight.trainer.spec.resume import prepare_states

Work = Coroutine[Any, Any, dict[str, Any]]
"""A run from the start of its components to its summary."""


@contextlib.contextmanager
def connected(
    arguments: TrainerArguments, folder: Path, start_timeout_s: float, total_steps: int = 0
) -> Iterator[tuple[Connection, Display]]:
    """Yield a connection to Ray and a display."""
    with (
        disk_errors(folder),
        ray_session(arguments.address, arguments.log_to_driver, start_timeout_s) as connection,
        make_display(arguments.progress, total_steps, folder) as display,
    ):
        yield connection, display


@contextlib.contextmanager
def launched(
    fit: Fit,
    arguments: TrainerArguments,
    describe: Callable[[Fit], dict[str, Any]],
    loggers: Iterable[Any] | None,
) -> Iterator[Work]:
    """Yield the work of a planned run, with a connection to Ray, a display and metric loggers.

    Args:
        arguments: the Trainer's.
        describe: returns the content of config.yaml.
        loggers: as for `Trainer(loggers=...)`.

    Raises:
        ConfigError: the run's folder or the store's cannot be written.
    """
    started, settings = time.perf_counter(), fit.settings
    check_writable(fit.folder, "output_dir")
    check_writable(Path(settings.store_path).parent, "store.path")
    start_timeout_s = settings.runner.start_timeout_s
    with connected(arguments, fit.folder, start_timeout_s, fit.total_steps) as (connection, display):
        if settings.runner.external:
            check_joinable(settings.name, connection.owns_cluster)
        fit.settings, notes = settings_for_cluster(settings, fit.requested)
        fit.find_start()
        training = fit.settings.learning
        config = describe(fit)
        config["run"]["dashboard"] = connection.dashboard
        all_loggers = [*find_loggers(loggers), StepMetrics(settings.name)]
        report = Report(fit.folder, display, config, started, fit.last_logged_step, all_loggers)
        shown: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if arguments.ui:
            shown = ui_process(fit.folder, report.note, connection.dashboard)
        with report, shown:
            for note in notes:
                report.note(note)
            report.stage(f"run {settings.name}")
            connection.announce(report.note, report.stage)
            if training is None:
                yield run_algorithm(fit, report, connection.owns_cluster)
                return
            prepare_states(fit.start, training.state_url, fit.state_config)
            if fit.settings.supervised is not None:
                yield train_supervised(fit, report, connection.owns_cluster)
                return
            yield train_policy(fit, report, connection.owns_cluster)


def show_summary(fit: Fit, summary: dict[str, Any], arguments: TrainerArguments) -> dict[str, Any]:
    """Print the summary of a run, unless its progress is not shown; return it."""
    if arguments.progress:
        (print_summary if fit.reports_training else print_run)(summary, str(fit.folder))
    return summary


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Raise raylight's errors without its own frames, which would hide the message."""
    try:
        yield
    except RaylightError as error:
        raise error.with_traceback(None) from None
