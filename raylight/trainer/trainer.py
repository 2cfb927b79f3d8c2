"""The Trainer: what a user calls."""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import secrets
import time
from pathlib import Path
from typing import Any

from raylight.agent.litagent import LitAgent, rollout
from raylight.agent.resources import NamedResources
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
from raylight.errors import ConfigError, RaylightError
from raylight.serving.choose import choose_engine
from raylight.trainer.blocking import run_blocking
from raylight.trainer.cluster import ray_session
from raylight.trainer.display import make_display, print_summary
from raylight.trainer.inputs import as_tasks, resolve_model
from raylight.trainer.loop import train
from raylight.trainer.report import Report
from raylight.trainer.session import RunPlan, Session

RESERVED = {"llm", "task", "rollout", "resources"}
"""Names that a rollout function's parameters have from raylight."""


class Trainer:
    """Trains an agent on a Ray cluster, or on a local one that it starts.

    Args:
        algorithm: what to train and how, for example `GRPO(model=...)`.
        output_dir: the run directory; a new one under `outputs/` if None.
        n_runners: RunnerActors; short for `runner={"n": ...}`.
        n_learners: learner ranks; short for `learner={"n": ...}`.
        port: HTTP port of the model; short for `engine={"port": ...}`.
        engine, runner, learner: settings of the components, as a dict or as EngineConfig, RunnerConfig, LearnerConfig.
        initial_resources: further named resources for the agent.
        seed: of task order and of sampling.
        address: of the Ray cluster; None joins the one at `RAY_ADDRESS` or on this machine, or starts a local one.
        progress: show steps while the run goes on, and a summary at its end.
        log_to_driver: print what actors print; otherwise their logs are in the dashboard and `ray logs`.

    Raises:
        ConfigError: a setting is unknown or does not fit.
    """

    def __init__(
        self,
        *,
        algorithm: PolicyAlgorithm,
        output_dir: str | Path | None = None,
        n_runners: int | None = None,
        n_learners: int | None = None,
        port: int | None = None,
        engine: EngineConfig | dict[str, Any] | None = None,
        runner: RunnerConfig | dict[str, Any] | None = None,
        learner: LearnerConfig | dict[str, Any] | None = None,
        initial_resources: NamedResources | None = None,
        seed: int = 0,
        address: str | None = None,
        progress: bool = True,
        log_to_driver: bool = False,
    ) -> None:
        if not isinstance(algorithm, PolicyAlgorithm):
            raise ConfigError(f"algorithm must be an algorithm such as GRPO(model=...), not {algorithm!r}")
        self._algorithm = algorithm
        self._output_dir = output_dir
        self._engine = EngineConfig.parse(engine, port=port)
        self._runner = RunnerConfig.parse(runner, n=n_runners)
        self._learner = LearnerConfig.parse(learner, n=n_learners)
        self._resources = dict(initial_resources or {})
        if taken := RESERVED & self._resources.keys():
            raise ConfigError(f"initial_resources cannot be named {', '.join(sorted(taken))}; raylight gives these itself")
        self._seed = seed
        self._address = address
        self._progress = progress
        self._log_to_driver = log_to_driver

    def fit(self, agent: LitAgent, train_dataset: Any, val_dataset: Any = None) -> dict[str, Any]:
        """Train the agent; returns the summary that is also in `summary.json`.

        Works in a script, in a notebook cell and in a Ray job. Whatever happens, no actor, deployment or placement group of the
        run remains, and a cluster that was there before stays up.

        Args:
            train_dataset: tasks, each given to the agent as it is; anything picklable.
            val_dataset: tasks on which progress is measured; never trained on.

        Raises:
            RaylightError: one of `raylight.errors`, which names what to do.
        """
        try:
            return self._fit(agent, train_dataset, val_dataset)
        except RaylightError as error:
            raise error.with_traceback(None) from None  # our own frames would hide the message

    def _fit(self, agent: LitAgent, train_dataset: Any, val_dataset: Any) -> dict[str, Any]:
        started = time.perf_counter()
        agent = _as_agent(agent)
        agent.check({"llm", *self._resources})
        train_tasks = as_tasks(train_dataset, "train_dataset", required=True)
        val_tasks = as_tasks(val_dataset, "val_dataset", required=False)
        plan = self._plan(len(train_tasks))
        folder = Path(self._output_dir or f"outputs/{plan.name}").expanduser().absolute()
        display = make_display(self._progress, plan.total_steps)
        with ray_session(self._address, self._log_to_driver) as ray, display as shown:
            report = Report(folder, shown, _resolved(plan), started)
            report.stage(f"run {plan.name}; Ray dashboard: {ray.dashboard or 'see the cluster'}")
            summary = run_blocking(_run(plan, agent, train_tasks, val_tasks, report, ray.local))
        if self._progress:
            print_summary(summary, str(folder))
        return summary

    def _max_mismatch(self) -> float:
        """The allowed difference of log-probs, resolved: rounding of half precision is no breach."""
        exact = self._engine.dtype == "float32" and self._learner.dtype == "fp32"
        return self._algorithm.max_logprob_mismatch or (1e-3 if exact else 0.5)

    def _plan(self, n_train: int) -> RunPlan:
        if self._engine.max_model_len > self._learner.max_tokens_per_micro_batch:
            raise ConfigError(
                f"a rollout may have {self._engine.max_model_len} tokens (engine.max_model_len), more than a learner takes at once "
                f"(learner.max_tokens_per_micro_batch = {self._learner.max_tokens_per_micro_batch}); lower one or raise the other"
            )
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return RunPlan(
            name=f"raylight-{stamp}-{secrets.token_hex(2)}",
            model_path=resolve_model(self._algorithm.model),
            algorithm=self._algorithm.model_copy(update={"max_logprob_mismatch": self._max_mismatch()}),
            engine=self._engine.model_copy(update={"kind": choose_engine(self._engine.kind)}),
            learner=self._learner,
            runner=self._runner,
            resources=self._resources,
            seed=self._seed,
            total_steps=self._algorithm.steps(n_train),
        )


async def _run(
    plan: RunPlan, agent: LitAgent, train_tasks: list[Any], val_tasks: list[Any], report: Report, cluster_ends: bool
) -> dict[str, Any]:
    """Bring the components up, train, save, summarise."""
    async with Session(plan, agent, report.stage, cluster_ends) as session:
        try:
            await session.watched(train(session, plan.algorithm, train_tasks, val_tasks, report))
        except asyncio.CancelledError:
            report.note("interrupted; stopping everything that belongs to this run")
            raise
        await session.learners.save(str(report.checkpoint))
        summary = report.finish({**await session.store.statistics(), "runners_lost": session.pool.lost})
        report.stage("stopping")
    return summary


def _as_agent(agent: Any) -> LitAgent:
    if isinstance(agent, LitAgent):
        return agent
    if callable(agent) and not isinstance(agent, type):
        return rollout(agent)
    raise ConfigError(f"agent must be a function decorated with @rollout or an instance of LitAgent, not {agent!r}")


def _resolved(plan: RunPlan) -> dict[str, Any]:
    """The run's configuration as it was resolved, for config.yaml."""
    algorithm = plan.algorithm.model_dump(mode="json")
    algorithm["rollout"]["retry_on"] = sorted(algorithm["rollout"]["retry_on"])
    return {
        "name": plan.name,
        "seed": plan.seed,
        "total_steps": plan.total_steps,
        "algorithm": {"name": type(plan.algorithm).__name__, **algorithm, "model": plan.model_path},
        "engine": plan.engine.model_dump(mode="json"),
        "learner": plan.learner.model_dump(mode="json"),
        "runner": plan.runner.model_dump(mode="json"),
        "resources": sorted(plan.resources),
        "versions": {name: importlib.metadata.version(name) for name in ("raylight", "ray", "torch", "transformers", "verl")},
    }
