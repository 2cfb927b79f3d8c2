"""The two kinds of run: one that trains a policy with the Trainer's own loop, and one whose algorithm brings a loop of its own."""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
import sys
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from raylight.agent.resources import LLM, NamedResources
from raylight.algorithms.base import Algorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import StoreConfig
from raylight.engines.registry import choose_engine
from raylight.errors import ConfigError
from raylight.experience.checkpoints import TrainingStates
from raylight.runner.pool import RunnerPayload
from raylight.runner.threads import AgentThreads
from raylight.traces.trained_agents import AgentFilter
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.display import print_run, print_summary
from raylight.trainer.inputs import Inputs, as_dataset, as_tasks, resolve_model
from raylight.trainer.loop import Training
from raylight.trainer.plan import (
    MODEL_NAME,
    PolicyPlan,
    RunPlan,
    merge_resources,
    must_have_endpoints,
    with_policy,
)
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Report
from raylight.trainer.resume import (
    Resume,
    describe_tasks,
    find_start,
    highest_version,
    new_start,
    prepare_states,
)
from raylight.trainer.run_context import TrainerRunContext
from raylight.trainer.served_algorithm import READ, ServedAlgorithmPlan, ServedAlgorithmSession, serving_plan
from raylight.trainer.session import Session

if TYPE_CHECKING:
    from raylight.trainer.trainer import Trainer


class Run:
    """A run from its plan to its summary."""

    plan: RunPlan
    report: Report
    total_steps: int = 0
    """0 where the algorithm alone knows."""

    def __init__(self, trainer: Trainer, inputs: Inputs, name: str, folder: Path) -> None:
        self.trainer = trainer
        self.inputs = inputs
        self.folder = folder
        self._cluster_ends = False
        resources = merge_resources(inputs.agent, trainer.initial_resources)
        self._common: dict[str, Any] = {
            "name": name,
            "payload": RunnerPayload(inputs.agent, trainer.tracer, trainer.hooks, secrets.token_hex(16)),
            "runner": trainer.runner,
            "store": trainer.store,
            "store_path": (isinstance(trainer.store, StoreConfig) and trainer.store.path)
            or str(folder / "store.db"),
            "resources": resources,
        }

    def begin(self, report: Report, cluster_ends: bool) -> None:
        self.report = report
        self._cluster_ends = cluster_ends

    def resume(self, resume: Resume) -> None:
        """Whether, and from where, to go on with an earlier run.

        Raises:
            ConfigError: nothing of this run can go on.
        """
        if resume is not False:
            raise ConfigError(
                f"nothing reads resume: {type(self.trainer.algorithm).__name__} leaves no training states"
            )

    @property
    def after(self) -> int | None:
        """The step after which the run in this folder goes on; None if it begins anew."""
        return None

    def finalize_plan(self) -> None:
        """Choose what depends on the cluster, once there is a connection to it."""

    def resolved(self) -> dict[str, Any]:
        """The run's configuration, for config.yaml."""
        return self.plan.resolved()

    async def work(self) -> dict[str, Any]:
        """Bring the components up, do the run's work, take them down; returns the summary."""
        raise NotImplementedError

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Show the summary."""
        raise NotImplementedError

    async def _noting(self, work: Any) -> Any:
        try:
            return await work
        except asyncio.CancelledError:
            self.report.note("interrupted; stopping everything that belongs to this run")
            raise


class PolicyRun(Run):
    """Trains a policy."""

    plan: PolicyPlan

    def __init__(
        self, trainer: Trainer, algorithm: PolicyAlgorithm, inputs: Inputs, name: str, folder: Path
    ) -> None:
        super().__init__(trainer, inputs, name, folder)
        if trainer.llm_proxy is not None:
            raise ConfigError(
                f"nothing reads llm_proxy: {type(algorithm).__name__} is served by raylight's own engine"
            )
        resources: NamedResources = self._common["resources"]
        self.train_tasks = as_tasks(inputs.train, "train_dataset", required=True)
        self.val_tasks = as_tasks(inputs.val, "val_dataset", required=False)
        if algorithm.patience is not None and not self.val_tasks:
            raise ConfigError("nothing reads patience: there are no validation tasks; give a val_dataset")
        modes = ("train", "val") if self.val_tasks else ("train",)
        inputs.agent.check(with_policy(resources, LLM(model=MODEL_NAME)), modes)
        _must_fit(trainer)
        self.plan = PolicyPlan(
            **self._common,
            model_path=resolve_model(algorithm.model),
            algorithm=algorithm.model_copy(
                update={"max_logprob_mismatch": _max_mismatch(trainer, algorithm)}
            ),
            engine=trainer.engine.model_copy(update={"kind": _trainable_engine(trainer)}),
            learner=trainer.learner,
            checkpoint=trainer.checkpoint,
            state_url=_state_url(trainer.checkpoint.path or str(folder / "state")),
            seed=trainer.seed,
            total_steps=algorithm.steps(len(self.train_tasks)),
            trained_agents=_trained_agents(trainer, inputs),
        )
        self.total_steps = self.plan.total_steps
        self._notes = trainer.run_settings.notes
        self._resume: Resume = False
        self.start = new_start()

    def resume(self, resume: Resume) -> None:
        if resume in (True, "auto") and self.trainer.output_dir is None:
            raise ConfigError("resume needs the output_dir of the run that is to go on")
        self._resume = resume

    @property
    def after(self) -> int | None:
        return self.start.after

    @property
    def _state_config(self) -> dict[str, Any]:
        """What a training state tells of its run."""
        return self.plan.resolved() | {"tasks": describe_tasks(self.train_tasks)}

    def finalize_plan(self) -> None:
        instead = self.trainer.run_settings.cpu_fallback
        if instead is not None and not ray.cluster_resources().get("GPU"):
            engine = instead.engine.model_copy(update={"kind": self.plan.engine.kind})
            self.plan = replace(self.plan, engine=engine, learner=instead.learner)
            self._notes = instead.notes
        highest = highest_version(self.folder / "metrics.jsonl")
        self.start = find_start(self._resume, self.plan.state_url, self._state_config, highest)
        if not self.start.own and self.plan.checkpoint.path and TrainingStates(self.plan.state_url).steps():
            raise ConfigError(
                f"there are training states of another run at {self.plan.state_url}; give checkpoint.path another folder, remove "
                "them, or resume that run"
            )

    def begin(self, report: Report, cluster_ends: bool) -> None:
        super().begin(report, cluster_ends)
        for note in self._notes:
            report.note(note)
        prepare_states(self.start, self.plan.state_url, self._state_config)

    async def work(self) -> dict[str, Any]:
        plan, report = self.plan, self.report
        async with PolicySession(plan, report.stage, self._cluster_ends, self.start) as session:
            training = Training(
                session, plan.algorithm, self.train_tasks, self.val_tasks, report, self._state_config
            )
            await self._noting(session.watched(training.run()))
            summary = report.finish(await session.counts())
            report.stage("stopping")
        return summary

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if self.trainer.progress:
            print_summary(summary, str(self.folder))
        return summary


class AlgorithmRun(Run):
    """Runs an algorithm that brings its own loop: it is given the store, and says itself what to roll out."""

    def __init__(
        self, trainer: Trainer, algorithm: Algorithm, inputs: Inputs, name: str, folder: Path
    ) -> None:
        super().__init__(trainer, inputs, name, folder)
        model = algorithm.served_model
        if unread := [name for name in trainer.given_for_policy if model is None or name not in READ]:
            trains = "serves no model" if model is None else "does not train the model that it serves"
            raise ConfigError(f"nothing reads {', '.join(unread)}: {type(algorithm).__name__} {trains}")
        self.algorithm = algorithm
        self._continues: Path | None = None
        self.plan = RunPlan(**self._common) if model is None else serving_plan(self._common, trainer, model)
        resources = (
            self.plan.resources if model is None else with_policy(self.plan.resources, LLM(model=MODEL_NAME))
        )
        if not algorithm.serves_model and model is None:
            must_have_endpoints(resources.items(), algorithm)
        self._datasets = {
            name: as_dataset(getattr(inputs, name), f"{name}_dataset") for name in ("train", "val")
        }
        self.total_steps = algorithm.total_steps(
            len(self._datasets["train"]) if self._datasets["train"] is not None else 0
        )
        inputs.agent.check(resources, more_may_come=not isinstance(algorithm, Baseline))

    def resume(self, resume: Resume) -> None:
        if resume is False or self.algorithm.result_file is None:
            return super().resume(resume)
        if resume in (True, "auto") and self.trainer.output_dir is None:
            raise ConfigError("resume needs the output_dir of the run that is to go on")
        given = self.folder if resume in (True, "auto") else Path(str(resume)).expanduser()
        file = given if given.is_file() else given / self.algorithm.result_file
        if file.exists():
            self._continues = file.absolute()
        elif resume != "auto":
            raise ConfigError(
                f"there is no {file} to go on from; resume='auto' begins anew where there is none"
            )

    @property
    def after(self) -> int | None:
        return (
            None if self._continues is None else sys.maxsize
        )  # only the algorithm knows; it records no step twice

    def resolved(self) -> dict[str, Any]:
        algorithm = {"name": type(self.algorithm).__name__, **self.algorithm.resolved()}
        return {**super().resolved(), "algorithm": algorithm}

    async def work(self) -> dict[str, Any]:
        report = self.report
        kind: Any = ServedAlgorithmSession if isinstance(self.plan, ServedAlgorithmPlan) else Session
        async with kind(self.plan, report.stage, self._cluster_ends) as session:
            await self._noting(session.watched(self._algorithm(session)))
            counts = await session.counts()
            summary = report.finish(counts) if self.algorithm.serves_model else report.finish_plain(counts)
            report.stage("stopping")
        return summary

    async def _algorithm(self, session: Session) -> None:
        algorithm, trainer = self.algorithm, self.trainer
        algorithm.set_trainer(trainer)
        algorithm.set_store(session.store)
        algorithm.set_adapter(trainer.adapter or TracerTraceToTriplet())
        algorithm.set_initial_resources(session.resources)
        algorithm.set_run_context(
            TrainerRunContext(
                self.report,
                self.plan.payload.secret,
                session.resources,
                self.inputs.agent.trained_agents,
                self._continues,
            )
        )
        if trainer.llm_proxy is not None:
            algorithm.set_llm_proxy(trainer.llm_proxy)
        work = {f"{name}_dataset": dataset for name, dataset in self._datasets.items()}
        if algorithm.is_async():
            await cast("Awaitable[None]", algorithm.run(**work))
        else:
            begun, raised = await AgentThreads().run(
                functools.partial(algorithm.run, **work)
            )  # a daemon: Ctrl-C does not wait
            if raised is not None:
                raise raised
            if inspect.isawaitable(begun):  # a plain function that hands on what an asynchronous one gave it
                await begun

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if self.trainer.progress:
            (print_summary if self.algorithm.serves_model else print_run)(summary, str(self.folder))
        return summary


def _state_url(path: str) -> str:
    """A folder in full, or a URL as it is."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _must_fit(trainer: Trainer) -> None:
    if trainer.engine.max_model_len > trainer.learner.max_tokens_per_micro_batch:
        raise ConfigError(
            f"a rollout may have {trainer.engine.max_model_len} tokens (engine.max_model_len), more than a learner takes at once "
            f"(learner.max_tokens_per_micro_batch = {trainer.learner.max_tokens_per_micro_batch}); lower one or raise the other"
        )


def _trainable_engine(trainer: Trainer) -> str:
    """The engine that samples from the policy.

    Raises:
        ConfigError: it takes no weights, or is not installed.
    """
    kind = choose_engine(trainer.engine)
    if kind == "upstream":
        raise ConfigError(
            "an upstream model cannot be trained, because its weights are elsewhere; leave engine.url out, and give a fixed model "
            "to the agent as a resource: LLM(endpoint=..., traced=True)"
        )
    return kind


def _max_mismatch(trainer: Trainer, algorithm: PolicyAlgorithm) -> float:
    """The allowed difference of log-probs, resolved: rounding of half precision is no breach."""
    exact = trainer.engine.dtype == "float32" and trainer.learner.dtype == "fp32"
    return algorithm.max_logprob_mismatch or (1e-3 if exact else 0.5)


def _trained_agents(trainer: Trainer, inputs: Inputs) -> str | None:
    """The pattern of trained agents, from the agent or from the adapter.

    Raises:
        ConfigError: both have one, it is no pattern, or the adapter has nothing that would be read.
    """
    of_agent, of_adapter = inputs.agent.trained_agents, getattr(trainer.adapter, "agent_match", None)
    if trainer.adapter is not None and of_adapter is None:
        raise ConfigError(
            f"nothing reads the adapter: {type(trainer.algorithm).__name__} trains on the tokens that the engine recorded; of an "
            "adapter it takes agent_match only"
        )
    if of_agent is not None and of_adapter is not None and of_agent != of_adapter:
        raise ConfigError(
            f"the agent says trained_agents={of_agent!r} and the adapter agent_match={of_adapter!r}; give one of them"
        )
    pattern = of_agent if of_agent is not None else of_adapter
    AgentFilter(pattern)
    return pattern
