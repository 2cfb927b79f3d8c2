"""The Trainer: raylight's entry point for training and evaluating agents."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raylight.agent.resources import NamedResources
from raylight.algorithms.base import FastAlgorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.components import build_component
from raylight.config import (
    CheckpointConfig,
    EngineConfig,
    LearnerConfig,
    RunnerConfig,
    StoreConfig,
)
from raylight.disk import disk_errors
from raylight.errors import ConfigError, RaylightError
from raylight.store.client import StoreClient
from raylight.synonyms import accept_synonyms
from raylight.traces.adapters import TraceAdapter
from raylight.traces.tracer import OtelTracer, Tracer
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.arguments import (
    Role,
    TrainerAlgorithm,
    TrainerArguments,
    parse_algorithm,
    parse_hooks,
    parse_resources,
    parse_role,
    parse_store,
)
from raylight.trainer.blocking import run_blocking
from raylight.trainer.cluster import ray_session
from raylight.trainer.cluster_monitor import run_until_lost, until_lost
from raylight.trainer.display import make_display
from raylight.trainer.engine_nodes import plan_for_nodes
from raylight.trainer.eval_run import EvalRun
from raylight.trainer.eval_session import EvalSettings
from raylight.trainer.hardware import plan_for_hardware
from raylight.trainer.inputs import Inputs, as_agent, as_tasks, check_validation_size, is_agent
from raylight.trainer.join_run import RemoteRunnerProcess, check_joinable
from raylight.trainer.loggers import find_loggers
from raylight.trainer.memory_check import check_memory
from raylight.trainer.report import Report
from raylight.trainer.resume import Resume
from raylight.trainer.runs import AlgorithmRun, PolicyRun, Run


class Trainer:
    """Trains an agent on a Ray cluster, or on a local one that it starts.

    A component (`algorithm`, `agent`, `tracer`, `adapter`, `llm_proxy`, each of `hooks` and `loggers`) is an
    instance, a class, a dotted name, or a dict of a class or name as `type` with arguments. An argument that
    nothing would read is an error.

    `n_workers` and `resources` are accepted for `n_runners` and `initial_resources`, and `val_data` for
    `val_dataset` (agent-lightning's names).

    Args:
        algorithm: the model and how it is trained, for example `GRPO(model=...)`, or an `Algorithm` with its
            own `run`.
        agent: the agent to train; may be passed to `fit` instead.
        train_dataset: training tasks; may be passed to `fit` instead.
        val_dataset: validation tasks; may be passed to `fit` instead.
        num_epochs: passes over the training tasks, for an algorithm with `n_epochs`.
        output_dir: the run directory; None creates one under `outputs/`.
        initial_resources: named resources for the agent; they override those that it declares.
        n_runners: number of RunnerActors; short for `runner={"n": ...}`.
        max_rollouts: number of rollouts after which a runner ends; short for `runner={"max_rollouts": ...}`.
        n_learners: number of learner ranks; short for `learner={"n": ...}`.
        port: HTTP port of the model; short for `engine={"port": ...}`.
        engine: settings of the serving deployment, a dict or an EngineConfig.
        runner: settings of the runners, a dict or a RunnerConfig.
        learner: settings of the learners, a dict or a LearnerConfig.
        checkpoint: settings of the training states, from which `fit(resume=...)` continues; a dict or a
            CheckpointConfig.
        store: settings of the run's store, a dict or a StoreConfig, or the client of an existing store.
        tracer: records spans inside the agent; None is an OtelTracer.
        adapter: converts spans to training data for an `Algorithm`; None, or a dict without a `type`, is a
            TracerTraceToTriplet. Policy-gradient algorithms read only its `agent_match`, because they train
            on the tokens that the engine recorded.
        llm_proxy: passed on to an `Algorithm`.
        hooks: called around every rollout; one, or several in order.
        loggers: metric loggers: "console", "jsonl", "plot", or loggers of your own (see
            `raylight.trainer.loggers`); None is these three.
        role: "algorithm" leaves the runners to other processes on the cluster. "runner" is such a process:
            its `fit` executes the rollouts of the run `run_name` until the run ends. None reads
            `RAYLIGHT_ROLE`, and is "both" without it.
        run_name: name by which the processes of a run find each other; None reads `RAYLIGHT_RUN`, or creates
            a new name.
        dev: True makes `fit` and `train` do what `dev` does.
        seed: seed of the task order and of sampling; None is 0.
        address: address of the Ray cluster; "local" starts one that ends with the run; None joins the
            cluster at `RAY_ADDRESS` or on this machine, and starts one if there is none.
        progress: show steps during the run, and a summary at its end; False also silences `Baseline`.
        log_to_driver: print the output of actors; otherwise it is in the dashboard and in `ray logs`.

    Raises:
        ConfigError: a setting is unknown, wrong, or would not be read.
    """

    @accept_synonyms(n_workers="n_runners", resources="initial_resources")
    def __init__(
        self,
        *,
        algorithm: TrainerAlgorithm | type[TrainerAlgorithm] | str | dict[str, Any] | None = None,
        agent: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        num_epochs: int | None = None,
        output_dir: str | Path | None = None,
        initial_resources: NamedResources | None = None,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        n_learners: int | None = None,
        port: int | None = None,
        engine: EngineConfig | dict[str, Any] | None = None,
        runner: RunnerConfig | dict[str, Any] | None = None,
        learner: LearnerConfig | dict[str, Any] | None = None,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
        store: StoreConfig | StoreClient | dict[str, Any] | None = None,
        tracer: Any = None,
        adapter: Any = None,
        llm_proxy: Any = None,
        hooks: Any = None,
        loggers: Sequence[Any] | None = None,
        role: Role | None = None,
        run_name: str | None = None,
        dev: bool = False,
        seed: int | None = None,
        address: str | None = None,
        progress: bool = True,
        log_to_driver: bool = False,
    ) -> None:
        plain = TrainerArguments(
            num_epochs=num_epochs,
            output_dir=output_dir,
            run_name=run_name,
            dev=dev,
            seed=seed,
            address=address,
            progress=progress,
            log_to_driver=log_to_driver,
        )
        self.specs = {
            "tracer": tracer,
            "adapter": adapter,
            "llm_proxy": llm_proxy,
            "hooks": hooks,
            "loggers": loggers,
        }
        """Components as they were specified, for config.yaml."""
        self.algorithm = parse_algorithm(algorithm, plain.num_epochs)
        self.agent = agent
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.initial_resources = parse_resources(initial_resources)
        self.runner = RunnerConfig.parse(runner, n=n_runners, max_rollouts=max_rollouts)
        self.role, self.run_name = parse_role(role, plain.run_name)
        if self.role == "algorithm":
            self.runner = self.runner.model_copy(update={"external": True})
        self.store = parse_store(store)
        self.tracer: Tracer = build_component(tracer, Tracer, "tracer", default=OtelTracer)
        self.adapter: TraceAdapter[Any] | None = (
            None
            if adapter is None
            else build_component(adapter, TraceAdapter, "adapter", dict_default=TracerTraceToTriplet)  # type: ignore[type-abstract]
        )
        self.llm_proxy = None if llm_proxy is None else build_component(llm_proxy, object, "llm_proxy")
        self.hooks = parse_hooks(hooks)
        self.loggers = find_loggers(loggers)
        requested = RunSettings(
            EngineConfig.parse(engine, port=port),
            LearnerConfig.parse(learner, n=n_learners),
            CheckpointConfig.parse(checkpoint),
            plain.seed,
            plain.output_dir,
        )
        self.requested_settings = requested
        self.run_settings = (
            self.algorithm.adjust_run_settings(requested)
            if isinstance(self.algorithm, PolicyAlgorithm)
            else requested
        )
        """Settings of engine, learners and run directory, as the algorithm adjusts them."""
        self.engine, self.learner = self.run_settings.engine, self.run_settings.learner
        self.checkpoint = self.run_settings.checkpoint
        self.seed, self.output_dir = self.run_settings.seed or 0, self.run_settings.output_dir
        self._dev = plain.dev
        self.address = plain.address
        self.progress = plain.progress
        self.log_to_driver = plain.log_to_driver
        only_policy = {
            "engine": engine,
            "learner": learner,
            "checkpoint": checkpoint,
            "n_learners": n_learners,
            "port": port,
            "seed": seed,
        }
        self.policy_arguments = sorted(name for name, value in only_policy.items() if value is not None)
        """Names of the given arguments that only an algorithm that trains a policy reads."""

    @accept_synonyms(val_data="val_dataset")
    def fit(
        self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None, *, resume: Resume = False
    ) -> dict[str, Any]:
        """Train the agent; return the summary that is also in `summary.json`.

        Works in a script, in a notebook cell and in a Ray job. When it returns or raises, no actor,
        deployment or placement group of the run remains; a cluster that existed before keeps running.

        Args:
            agent: decorated function, LitAgent, or a specification of one. If the Trainer has an agent, the
                training dataset may be the first argument instead.
            train_dataset: tasks, each passed to the agent unchanged: plain data, see docs/agents.md.
            val_dataset: tasks for evaluation, which are never trained on.
            resume: "auto" continues the run in `output_dir` if it has a training state, and starts fresh
                otherwise; True requires one. A path names a training state, or the run, to continue from. No
                rollout is trained twice and no finished one is lost: the steps after the state are replayed
                from the store. Settings may differ, except model, algorithm and adapter.

        Raises:
            RaylightError: one of `raylight.errors`, with what to do.
        """
        if self.role == "runner":
            return self._join_run(agent)
        return self._run_blocking(self._chosen_algorithm(), agent, train_dataset, val_dataset, resume)

    @accept_synonyms(val_data="val_dataset")
    async def train(
        self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None, *, resume: Resume = False
    ) -> dict[str, Any]:
        """`fit` for asynchronous callers. Cancelling it stops the run and cleans up."""
        if self.role == "runner":
            return await RemoteRunnerProcess(self, agent if is_agent(agent) else None).work()
        with self._run(self._chosen_algorithm(), agent, train_dataset, val_dataset, resume) as run:
            return run.finish(await until_lost(run.work(), run.remedy))

    @accept_synonyms(val_data="val_dataset")
    def dev(self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None) -> dict[str, Any]:
        """Try the agent with a fast algorithm; the default is `Baseline`, which executes the agent and prints
        its rollouts.

        Raises:
            TypeError: the Trainer's algorithm is not a FastAlgorithm.
        """
        if self.role == "runner":
            return self._join_run(agent)
        return self._run_blocking(self._fast_algorithm(), agent, train_dataset, val_dataset)

    def evaluate(
        self,
        agent: Any = None,
        dataset: Any = None,
        *,
        model: str | None = None,
        lora_adapter: str | None = None,
        samples: int = 1,
        **settings: Any,
    ) -> dict[str, Any]:
        """Score a model on tasks without training; return the content of `eval.json`.

        Args:
            agent: as for `fit`.
            dataset: tasks; None is the Trainer's `val_dataset`.
            model: folder or name; None is the algorithm's model.
            lora_adapter: folder of a LoRA adapter in peft's format.
            samples: rollouts per task.
            settings: other fields of `raylight.trainer.eval_session.EvalSettings`, such as
                `sampling={"temperature": 0.0}`.

        Raises:
            RaylightError: one of `raylight.errors`, with what to do.
        """
        if self.role != "both":
            raise ConfigError(
                "nothing reads role: an evaluation starts its own runners; leave role and RAYLIGHT_ROLE out"
            )
        model = model or getattr(self.algorithm, "model", None)
        if model is None:
            raise ConfigError("there is no model to score: give model=...")
        tasks = as_tasks(dataset if dataset is not None else self.val_dataset, "dataset", required=True)
        chosen = EvalSettings(model=model, lora_adapter=lora_adapter, samples=samples, **settings)
        check_validation_size(len(tasks), chosen.samples, "samples")
        folder = Path(self.output_dir or f"outputs/eval-{_new_suffix()}").expanduser().absolute()
        try:
            run = EvalRun(self, as_agent(agent if agent is not None else self.agent), tasks, chosen, folder)
            return run.run(self.address, self.log_to_driver)
        except RaylightError as error:
            raise error.with_traceback(None) from None

    def _join_run(self, agent: Any) -> dict[str, Any]:
        try:
            return run_blocking(RemoteRunnerProcess(self, agent if is_agent(agent) else None).work())
        except RaylightError as error:
            raise error.with_traceback(None) from None

    def _chosen_algorithm(self) -> TrainerAlgorithm:
        if self._dev:
            return self._fast_algorithm()
        if self.algorithm is None:
            raise ConfigError(
                "the Trainer has no algorithm; give it one, such as GRPO(model=...), or call dev() to try "
                "the agent"
            )
        return self.algorithm

    def _fast_algorithm(self) -> FastAlgorithm:
        algorithm = Baseline() if self.algorithm is None else self.algorithm
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                f"dev() requires a FastAlgorithm, and the Trainer's is {type(algorithm).__name__}; use "
                "Baseline()"
            )
        return algorithm

    def _run_blocking(
        self,
        algorithm: TrainerAlgorithm,
        agent: Any,
        train_dataset: Any,
        val_dataset: Any,
        resume: Resume = False,
    ) -> dict[str, Any]:
        try:
            with self._run(algorithm, agent, train_dataset, val_dataset, resume) as run:
                return run.finish(run_until_lost(run.work(), run.remedy))
        except RaylightError as error:
            raise error.with_traceback(None) from None  # raylight's own frames would hide the message

    @contextlib.contextmanager
    def _run(
        self, algorithm: TrainerAlgorithm, agent: Any, train_dataset: Any, val_dataset: Any, resume: Resume
    ) -> Iterator[Run]:
        """Yield a checked and planned run, with a connection to Ray, a display and metric loggers."""
        started = time.perf_counter()
        if agent is not None and self.agent is not None and train_dataset is None and not is_agent(agent):
            agent, train_dataset = None, agent  # fit(train_dataset)
        agent = agent if agent is not None else self.agent
        inputs = Inputs(
            as_agent(agent),
            train_dataset if train_dataset is not None else self.train_dataset,
            val_dataset if val_dataset is not None else self.val_dataset,
            agent,
        )
        name = self.run_name or f"raylight-{_new_suffix()}"
        folder = Path(self.output_dir or f"{self.run_settings.outputs}/{name}").expanduser().absolute()
        kind = PolicyRun if isinstance(algorithm, PolicyAlgorithm) else AlgorithmRun
        run: Run = kind(self, algorithm, inputs, name, folder)  # type: ignore[arg-type]
        run.resume(resume)
        with (
            disk_errors(folder),
            ray_session(self.address, self.log_to_driver, self.runner.start_timeout_s) as connection,
            make_display(self.progress, run.total_steps) as display,
        ):
            if self.runner.external:
                check_joinable(name, connection.owns_cluster)
            run.fall_back_to_cpus()
            run.plan, hardware_notes = plan_for_hardware(run.plan, self.engine)
            run.plan = plan_for_nodes(run.plan, self.engine)
            check_memory(run.plan)
            run.finalize_plan()
            report = Report(folder, display, run.config(), started, run.last_logged_step, self.loggers)
            with contextlib.closing(report):
                run.begin(report, connection.owns_cluster)
                for note in hardware_notes:
                    report.note(note)
                report.stage(f"run {name}")
                connection.announce(report.note, report.stage)
                yield run


def _new_suffix() -> str:
    """Return a unique suffix for the name of a run, with the current time."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
