"""The two kinds of run: PolicyRun trains a policy with the Trainer's loop, AlgorithmRun runs an algorithm's
own loop."""

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
from raylight.algorithms.verl import VERL
from raylight.config import StoreConfig
from raylight.errors import ConfigError
from raylight.runner.actor import RunnerPayload
from raylight.runner.threads import AgentThreads
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.cluster_monitor import is_cluster_lost
from raylight.trainer.display import print_run, print_summary
from raylight.trainer.inputs import Inputs, as_dataset, as_tasks, check_validation_size, resolve_model
from raylight.trainer.loop import Training
from raylight.trainer.plan import (
    MODEL_NAME,
    PolicyPlan,
    RunPlan,
    merge_resources,
    must_have_endpoints,
    with_policy,
)
from raylight.trainer.policy_checks import (
    check_lengths,
    idle_hardware,
    resolve_state_url,
    trainable_engine,
    trained_agents_pattern,
    with_mismatch_limit,
    with_transport,
)
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Report
from raylight.trainer.resume import (
    Resume,
    check_no_other_run,
    find_resume_point,
    fingerprint_tasks,
    fresh_start,
    highest_logged_step,
    highest_logged_version,
    prepare_states,
)
from raylight.trainer.run_context import TrainerRunContext
from raylight.trainer.run_file import (
    describe_algorithm,
    describe_component,
    describe_data,
    describe_resources,
)
from raylight.trainer.served_adapter import with_adapter
from raylight.trainer.served_algorithm import (
    SERVING_ARGUMENTS,
    ServedAlgorithmPlan,
    ServedAlgorithmSession,
    serving_plan,
)
from raylight.trainer.session import Session

if TYPE_CHECKING:
    from raylight.trainer.trainer import Trainer


class Run:
    """A run, from its plan to its summary."""

    plan: RunPlan
    report: Report
    total_steps: int = 0
    """Planned number of steps; 0 if only the algorithm knows it."""

    def __init__(self, trainer: Trainer, inputs: Inputs, name: str, folder: Path) -> None:
        self.trainer = trainer
        self.inputs = inputs
        self.folder = folder
        self._owns_cluster = False
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

    def begin(self, report: Report, owns_cluster: bool) -> None:
        """Set the run's output; called after `finalize_plan`."""
        self.report = report
        self._owns_cluster = owns_cluster

    def resume(self, resume: Resume) -> None:
        """Set the starting point, as for `Trainer.fit(resume=...)`.

        Raises:
            ConfigError: a run of this kind cannot resume.
        """
        if resume is not False:
            raise ConfigError(
                f"nothing reads resume: {type(self.trainer.algorithm).__name__} writes no training states; "
                "leave resume out"
            )

    @property
    def remedy(self) -> str:
        """Advice on how to continue after the cluster was lost."""
        return f"Start the run again; its records are in {self.folder}"

    @property
    def last_logged_step(self) -> int | None:
        """Last step whose metrics are kept; None if the run directory starts empty."""
        return None

    def fall_back_to_cpus(self) -> None:
        """Use the settings for a cluster without GPUs, if it has none; called after the connection to Ray."""

    def finalize_plan(self) -> None:
        """Choose settings that depend on those for the hardware; called after these are known."""

    def config(self) -> dict[str, Any]:
        """Return the content of config.yaml: a run file that starts this run again (see `RunFile`)."""
        trainer, plan, inputs = self.trainer, self.plan, self.inputs
        facts = plan.resolved()
        content = {
            "agent": describe_component(inputs.agent_spec),
            "data": {"train": describe_data(inputs.train), "val": describe_data(inputs.val)},
            "algorithm": self._describe_algorithm(),
            "output_dir": str(self.folder),
            "seed": facts.pop("seed", None),
            "resources": describe_resources(trainer.initial_resources) or None,
            **{
                name: facts.pop(name, None) for name in ("engine", "learner", "runner", "checkpoint", "store")
            },
            **{name: describe_component(spec) for name, spec in trainer.specs.items()},
            "address": trainer.address,
            "progress": trainer.progress,
            "log_to_driver": trainer.log_to_driver,
            "run": {name: value for name, value in facts.items() if name not in ("algorithm", "model")},
        }
        return {name: value for name, value in content.items() if value is not None}

    def _describe_algorithm(self) -> dict[str, Any]:
        raise NotImplementedError

    async def work(self) -> dict[str, Any]:
        """Start the components, do the run's work, stop the components; return the summary."""
        raise NotImplementedError

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Print the summary; return it."""
        raise NotImplementedError

    async def _report_interrupt(self, work: Any) -> Any:
        """Await `work`; show a note if it is cancelled."""
        try:
            return await work
        except asyncio.CancelledError:
            lost = is_cluster_lost()
            self.report.note(
                "the Ray cluster is lost" if lost else "interrupted; stopping the components of this run"
            )
            raise


class PolicyRun(Run):
    """A run that trains a policy with the Trainer's loop."""

    plan: PolicyPlan

    def __init__(
        self, trainer: Trainer, algorithm: PolicyAlgorithm, inputs: Inputs, name: str, folder: Path
    ) -> None:
        super().__init__(trainer, inputs, name, folder)
        if trainer.llm_proxy is not None:
            raise ConfigError(
                "nothing reads llm_proxy: raylight's own engine serves the model of "
                f"{type(algorithm).__name__}; leave it out"
            )
        resources: NamedResources = self._common["resources"]
        self.train_tasks = as_tasks(inputs.train, "train_dataset", required=True)
        self.val_tasks = as_tasks(inputs.val, "val_dataset", required=False)
        if algorithm.patience is not None and not self.val_tasks:
            raise ConfigError("nothing reads patience: there are no validation tasks; give a val_dataset")
        check_validation_size(len(self.val_tasks), algorithm.val_samples, "val_samples")
        modes = ("train", "val") if self.val_tasks else ("train",)
        inputs.agent.check(with_policy(resources, LLM(model=MODEL_NAME)), modes)
        check_lengths(trainer)
        self.plan = PolicyPlan(
            **self._common,
            model_path=resolve_model(algorithm.model),
            algorithm=algorithm,
            engine=trainable_engine(trainer),
            learner=trainer.learner,
            checkpoint=trainer.checkpoint,
            output_dir=str(folder),
            state_url=resolve_state_url(trainer.checkpoint.path or str(folder / "state")),
            seed=trainer.seed,
            total_steps=algorithm.steps(len(self.train_tasks)),
            trained_agents=trained_agents_pattern(trainer, inputs),
        )
        self.total_steps = self.plan.total_steps
        self._notes = trainer.run_settings.notes
        self._resume: Resume = False
        self.start = fresh_start()

    def resume(self, resume: Resume) -> None:
        if resume in (True, "auto") and self.trainer.output_dir is None:
            raise ConfigError("resume has no run to continue: give the Trainer its output_dir")
        self._resume = resume

    @property
    def remedy(self) -> str:
        return (
            f"Continue after the last training state with output_dir={str(self.folder)!r} and "
            "fit(resume='auto'), or `raylight train FILE --resume`"
        )

    @property
    def last_logged_step(self) -> int | None:
        return self.start.last_logged_step

    def config(self) -> dict[str, Any]:
        content = super().config()
        if isinstance(self.plan.algorithm, VERL):
            # VERL derives the rest from its configuration again, and rejects other values beside it
            requested = self.trainer.requested_settings
            for name in ("engine", "learner", "checkpoint"):
                content[name] = getattr(requested, name).model_dump(mode="json", exclude_unset=True)
            if requested.seed is None:
                del content["seed"]
            if requested.output_dir is None and self.trainer.output_dir is not None:
                del content["output_dir"]
        return content

    def _describe_algorithm(self) -> dict[str, Any]:
        return describe_algorithm(self.plan.algorithm) | (
            {} if isinstance(self.plan.algorithm, VERL) else {"model": self.plan.model_path}
        )

    @property
    def _state_config(self) -> dict[str, Any]:
        """The configuration that is stored with a training state."""
        return self.plan.resolved() | {"tasks": fingerprint_tasks(self.train_tasks)}

    def fall_back_to_cpus(self) -> None:
        requested = self.trainer.run_settings
        settings = requested.for_hardware(ray.cluster_resources().get("GPU", 0))
        if settings is not requested:
            engine = settings.engine.model_copy(update={"kind": self.plan.engine.kind})
            self.plan = replace(self.plan, engine=engine, learner=settings.learner)
            self._notes = settings.notes

    def finalize_plan(self) -> None:
        self.plan = with_adapter(with_mismatch_limit(with_transport(self.plan)))
        metrics = self.folder / "metrics.jsonl"
        highest = highest_logged_version(metrics)
        start = find_resume_point(self._resume, self.plan.state_url, self._state_config, highest)
        self.start = replace(start, completed_step=highest_logged_step(metrics))
        if self.plan.checkpoint.path:
            check_no_other_run(self.start, self.plan.state_url)

    def begin(self, report: Report, owns_cluster: bool) -> None:
        super().begin(report, owns_cluster)
        idle = idle_hardware(self.plan.engine, self.plan.learner, ray.cluster_resources())
        for note in (*self._notes, *idle):
            report.note(note)
        prepare_states(self.start, self.plan.state_url, self._state_config)

    async def work(self) -> dict[str, Any]:
        plan, report = self.plan, self.report
        async with PolicySession(plan, report.stage, self._owns_cluster, self.start) as session:
            training = Training(
                session, plan.algorithm, self.train_tasks, self.val_tasks, report, self._state_config
            )
            await self._report_interrupt(session.watched(training.run()))
            summary = report.finish(await session.counts())
            report.stage("stopping")
        return summary

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if self.trainer.progress:
            print_summary(summary, str(self.folder))
        return summary


class AlgorithmRun(Run):
    """A run of an algorithm with its own loop, which enqueues rollouts in the store itself."""

    def __init__(
        self, trainer: Trainer, algorithm: Algorithm, inputs: Inputs, name: str, folder: Path
    ) -> None:
        super().__init__(trainer, inputs, name, folder)
        model = algorithm.served_model
        if unused := [
            name for name in trainer.policy_arguments if model is None or name not in SERVING_ARGUMENTS
        ]:
            trains = "serves no model" if model is None else "does not train the model that it serves"
            raise ConfigError(
                f"nothing reads {', '.join(unused)}: {type(algorithm).__name__} {trains}; leave these "
                "arguments out"
            )
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
            raise ConfigError("resume has no run to continue: give the Trainer its output_dir")
        path = self.folder if resume in (True, "auto") else Path(str(resume)).expanduser()
        file = path if path.is_file() else path / self.algorithm.result_file
        if file.exists():
            self._continues = file.absolute()
        elif resume != "auto":
            raise ConfigError(
                f"there is no {file} to resume from; pass resume='auto' to start fresh where there is none"
            )

    @property
    def last_logged_step(self) -> int | None:
        # the algorithm itself continues after its last step, so all rows are kept
        return None if self._continues is None else sys.maxsize

    def _describe_algorithm(self) -> dict[str, Any]:
        return describe_algorithm(self.algorithm)

    async def work(self) -> dict[str, Any]:
        report = self.report
        kind: Any = ServedAlgorithmSession if isinstance(self.plan, ServedAlgorithmPlan) else Session
        async with kind(self.plan, report.stage, self._owns_cluster) as session:
            await self._report_interrupt(session.watched(self._algorithm(session)))
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
        datasets = {f"{name}_dataset": dataset for name, dataset in self._datasets.items()}
        if algorithm.is_async():
            await cast("Awaitable[None]", algorithm.run(**datasets))
        else:
            # in a daemon thread, for which Ctrl-C does not wait
            result, error = await AgentThreads().run(functools.partial(algorithm.run, **datasets))
            if error is not None:
                raise error
            if inspect.isawaitable(result):  # a plain function that returns a coroutine
                await result

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if self.trainer.progress:
            (print_summary if self.algorithm.serves_model else print_run)(summary, str(self.folder))
        return summary
