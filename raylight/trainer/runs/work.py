"""The work of a run of `Trainer.fit`: the Trainer's loop, or the loop of an algorithm of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Iterator
from typing import Any, cast

from raylight._utils.agent_threads import AgentThreads
from raylight.algorithms.base import Algorithm
from raylight.trainer.components.run import Run
from raylight.trainer.loops.policy_loop import Training
from raylight.trainer.loops.policy_rollouts import cancel_undecided
from raylight.trainer.loops.run_context import TrainerRunContext
from raylight.trainer.loops.supervised_loop import SupervisedLoop
from raylight.trainer.output.report import Report
from raylight.trainer.ray_session.cluster_monitor import is_cluster_lost
from raylight.trainer.runs.run_plan import Fit


async def train_policy(fit: Fit, report: Report, owns_cluster: bool) -> dict[str, Any]:
    """Train a policy with the Trainer's loop; return the summary."""
    start = fit.start
    keeps = fit.settings.sessions is not None
    prepare = functools.partial(cancel_undecided, start=start, keeps=keeps) if start.same_run else None
    async with Run(fit.settings, report.stage, owns_cluster, start, prepare) as run:
        training = Training(run, fit.train, fit.val, report, fit.state_config, fit.stop)
        with _noted_interrupt(report):
            async with run.watched():
                await training.run()
        summary = report.finish(await run.counts())
        report.stage("stopping")
    return summary


async def train_supervised(fit: Fit, report: Report, owns_cluster: bool) -> dict[str, Any]:
    """Train a model on given examples; return the summary."""
    async with Run(fit.settings, report.stage, owns_cluster, fit.start) as run:
        training = SupervisedLoop(run, fit.train, report, fit.state_config)
        with _noted_interrupt(report):
            async with run.watched():
                await training.run()
        summary = report.finish_supervised(await run.counts())
        report.stage("stopping")
    return summary


async def run_algorithm(fit: Fit, report: Report, owns_cluster: bool) -> dict[str, Any]:
    """Run the loop of an algorithm of its own; return the summary."""
    async with Run(fit.settings, report.stage, owns_cluster) as run:
        with _noted_interrupt(report):
            async with run.watched():
                await call_algorithm(fit, run, report)
        counts = await run.counts()
        summary = report.finish(counts) if fit.reports_training else report.finish_plain(counts)
        report.stage("stopping")
    return summary


async def call_algorithm(fit: Fit, run: Run, report: Report) -> None:
    """Call `run` of an algorithm, after giving it the parts of the run that it may use."""
    algorithm = cast("Algorithm", fit.algorithm)
    algorithm.set_store(run.store)
    algorithm.set_initial_resources(run.serving.resources)
    algorithm.set_run_context(TrainerRunContext(report, fit.resume_file))
    datasets = {"train_dataset": fit.train, "val_dataset": fit.val}
    if algorithm.is_async():
        await cast("Awaitable[None]", algorithm.run(**datasets))
        return
    # in a daemon thread, for which Ctrl-C does not wait
    result, error = await AgentThreads().run(functools.partial(algorithm.run, **datasets))
    if error is not None:
        raise error
    if inspect.isawaitable(result):  # a plain function that returns a coroutine
        await result


@contextlib.contextmanager
def _noted_interrupt(report: Report) -> Iterator[None]:
    """Show a note if the block is cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        lost = is_cluster_lost()
        report.note("the Ray cluster is lost" if lost else "interrupted; stopping the components of this run")
        raise
