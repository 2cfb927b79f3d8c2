"""The Trainer: raylight's entry point for training and evaluating agents."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from raylight._utils.synonyms import accept_synonyms
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import NamedResources
from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.components import build_component
from raylight.config import (
    CheckpointConfig,
    EngineConfig,
    LearnerConfig,
    RunnerConfig,
    SessionConfig,
    StoreConfig,
)
from raylight.errors import ConfigError
from raylight.runner.actor import RunnerPayload
from raylight.store.client import StoreClient
from raylight.tasks.datasets import DevTaskLoader
from raylight.traces.trace_adapter import TraceAdapter
from raylight.traces.tracer import OtelTracer, Tracer
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.launch import Work, evaluating, launched, short_errors, show_summary
from raylight.trainer.output.displays.tables import print_scores
from raylight.trainer.output.loggers.registry import find_loggers
from raylight.trainer.output.report import Report
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.trainer.ray_session.cluster_monitor import until_lost, watch_loss
from raylight.trainer.runs.custom_run import CustomRun
from raylight.trainer.runs.eval_run import EvalRun, EvalSettings, clear_results
from raylight.trainer.runs.join_run import RemoteRunnerProcess
from raylight.trainer.runs.policy_run import PolicyRun
from raylight.trainer.runs.run_spec import RunSpec
from raylight.trainer.runs.supervised_run import SupervisedRun
from raylight.trainer.spec.arguments import (
    PROCESS_ARGUMENTS,
    GivenSettings,
    Role,
    TrainerAlgorithm,
    TrainerArguments,
    check_no_proxy,
    check_unread,
    chosen_algorithm,
    given_names,
    parse_algorithm,
    parse_group_reward,
    parse_hooks,
    parse_resources,
    parse_role,
    parse_store,
)
from raylight.trainer.spec.inputs import Inputs, as_agent, as_tasks, is_agent
from raylight.trainer.spec.resume import Resume
from raylight.trainer.spec.run_resources import merge_resources
from raylight.trainer.spec.settings import RolloutSettings
from raylight.types import JsonObject


class Trainer:
    """Trains an agent on a Ray cluster, or on a local one that it starts.

    A component (`algorithm`, `agent`, `tracer`, `adapter`, `llm_proxy`, `group_reward`, each of `hooks` and
    `loggers`) is an instance, a class, a dotted name, or a dict of a class or name as `type` with arguments.

    `n_workers` and `resources` are accepted for `n_runners` and `initial_resources`, and `val_data` for
    `val_dataset` (agent-lightning's names).

    Args:
        algorithm: such as `GRPO(model=...)`, or an `Algorithm` with its own `run`.
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
        checkpoint: settings of the training states, a dict or a CheckpointConfig.
        store: settings of the run's store, a dict or a StoreConfig, or the client of an existing store.
        tracer: records spans inside the agent; None is an OtelTracer.
        adapter: converts spans to training data for an `Algorithm`; None, or a dict without a `type`, is a
            TracerTraceToTriplet. Policy-gradient algorithms read only its `agent_match`, because they train
            on the tokens that the engine recorded.
        llm_proxy: passed on to an `Algorithm`.
        hooks: called around every rollout; one, or several in order.
        group_reward: rewards a group's finished rollouts together, such as `rl.rewards.ruler(llm)`
            (docs/rewards.md).
        loggers: metric loggers: "console", "jsonl", "plot", which None stands for; the trackers "wandb",
            "mlflow", "tensorboard", "trackio", "swanlab", "clearml" and "otlp", each with an extra of
            raylight; or your own loggers (see docs/trackers.md).
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
        ui: show the run in the browser while it goes on; `raylight ui` shows it afterwards.
        log_to_driver: print the output of actors; otherwise it is in the dashboard and in `ray logs`.

    Raises:
        ConfigError: a setting is unknown, wrong, or would not be read.
    """

    @accept_synonyms(n_workers="n_runners", resources="initial_resources")
    def __init__(
        self,
        *,
        algorithm: TrainerAlgorithm | type[TrainerAlgorithm] | str | JsonObject | None = None,
        agent: object = None,
        train_dataset: object = None,
        val_dataset: object = None,
        num_epochs: int | None = None,
        output_dir: str | Path | None = None,
        initial_resources: NamedResources | None = None,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        n_learners: int | None = None,
        port: int | None = None,
        engine: EngineConfig | JsonObject | None = None,
        runner: RunnerConfig | JsonObject | None = None,
        learner: LearnerConfig | JsonObject | None = None,
        checkpoint: CheckpointConfig | JsonObject | None = None,
        store: StoreConfig | StoreClient | JsonObject | None = None,
        tracer: object = None,
        adapter: object = None,
        llm_proxy: object = None,
        hooks: object = None,
        group_reward: object = None,
        loggers: Sequence[object] | None = None,
        role: Role | None = None,
        run_name: str | None = None,
        dev: bool = False,
        seed: int | None = None,
        address: str | None = None,
        progress: bool = True,
        ui: bool = False,
        log_to_driver: bool = False,
    ) -> None:
        plain = self.arguments = TrainerArguments(
            num_epochs=num_epochs,
            output_dir=output_dir,
            run_name=run_name,
            dev=dev,
            seed=seed,
            address=address,
            progress=progress,
            ui=ui,
            log_to_driver=log_to_driver,
        )
        self.specs = {
            "tracer": tracer,
            "adapter": adapter,
            "llm_proxy": llm_proxy,
            "hooks": hooks,
            "group_reward": group_reward,
            "loggers": loggers,
        }
        """Components as specified, for config.yaml."""
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
        self.group_reward = parse_group_reward(group_reward)
        self.requested_settings = RunSettings(
            EngineConfig.parse(engine, port=port),
            LearnerConfig.parse(learner, n=n_learners),
            CheckpointConfig.parse(checkpoint),
            plain.seed,
            plain.output_dir,
            loggers=loggers,
        )
        self.run_settings = self.requested_settings
        """Settings of engine, learners and run directory, as the algorithm adjusts them."""
        if isinstance(self.algorithm, PolicyAlgorithm):
            self.run_settings = self.algorithm.adjust_run_settings(self.requested_settings)
        self.engine, self.learner = self.run_settings.engine, self.run_settings.learner
        self.checkpoint, self.loggers = self.run_settings.checkpoint, find_loggers(self.run_settings.loggers)
        self.seed, self.output_dir = self.run_settings.seed or 0, self.run_settings.output_dir
        of_both = {"engine": engine, "port": port, "group_reward": group_reward}
        self.policy_arguments = given_names(
            learner=learner, checkpoint=checkpoint, n_learners=n_learners, seed=seed, **of_both
        )
        """Names of the given arguments that only an algorithm that trains a policy reads."""
        role = None if self.role == "both" else self.role
        counts = of_both | {"n_runners": n_runners, "max_rollouts": max_rollouts, "role": role}
        components = self.specs | counts | {"loggers": None, "initial_resources": initial_resources or None}
        self.rollout_arguments = given_names(runner=runner, store=store, **components)
        """Names of the given arguments that only an algorithm with rollouts reads."""

    @accept_synonyms(val_data="val_dataset")
    def fit(
        self,
        agent: object = None,
        train_dataset: object = None,
        val_dataset: object = None,
        *,
        resume: Resume = False,
    ) -> JsonObject:
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
        with short_errors():
            if self.role == "runner":
                return run_blocking(self._remote_runners(agent).work())
            algorithm = chosen_algorithm(self.algorithm, self.arguments.dev)
            run = self._plan(algorithm, agent, train_dataset, val_dataset, resume)
            with self._launched(run) as work:
                summary = run_blocking(until_lost(work, run.remedy), watch_loss(run.remedy))
            return show_summary(run, summary, self.arguments)

    @accept_synonyms(val_data="val_dataset")
    async def train(
        self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None, *, resume: Resume = False
    ) -> JsonObject:
        """`fit` for asynchronous callers. Cancelling it stops the run and cleans up."""
        if self.role == "runner":
            return await self._remote_runners(agent).work()
        algorithm = chosen_algorithm(self.algorithm, self.arguments.dev)
        run = self._plan(algorithm, agent, train_dataset, val_dataset, resume)
        with self._launched(run) as work:
            summary = await until_lost(work, run.remedy)
        return show_summary(run, summary, self.arguments)

    @accept_synonyms(val_data="val_dataset")
    def dev(
        self, agent: object = None, train_dataset: object = None, val_dataset: object = None
    ) -> JsonObject:
        """Try the agent with a fast algorithm, by default `Baseline`, which prints the agent's rollouts.

        Raises:
            TypeError: the Trainer's algorithm is not a FastAlgorithm.
        """
        arguments = self.arguments
        self.arguments = arguments.model_copy(update={"dev": True})
        try:
            return self.fit(agent, train_dataset, val_dataset)
        finally:
            self.arguments = arguments

    def evaluate(
        self,
        agent: object = None,
        dataset: object = None,
        *,
        model: str | None = None,
        lora_adapter: str | dict[str, str] | None = None,
        samples: int = 1,
        **settings: Any,
    ) -> JsonObject:
        """Score a model on tasks without training; return the content of `eval.json`.

        Args:
            agent: as for `fit`.
            dataset: tasks; None is the Trainer's `val_dataset`.
            model: folder or name; None is the algorithm's model.
            lora_adapter: folder of a LoRA adapter in peft's format; or folders by the name of each of
                several models.
            samples: rollouts per task.
            settings: other fields of `raylight.trainer.runs.eval_run.EvalSettings`, such as
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
        folder = Path(self.output_dir or f"outputs/eval-{_new_suffix()}").expanduser().absolute()
        with short_errors():
            given = as_agent(agent if agent is not None else self.agent)
            name = f"raylight-eval-{secrets.token_hex(4)}"
            common = self._agent_settings(given, name, folder / "eval.db")
            run = EvalRun.plan(common, chosen, given, tasks, self.run_settings)
            clear_results(folder)
            with evaluating(run, self.arguments) as work:
                figures = run_blocking(until_lost(work, run.remedy), watch_loss(run.remedy))
        if self.arguments.progress:
            print_scores(figures, str(folder))
        return figures

    def _remote_runners(self, agent: object) -> RemoteRunnerProcess:
        if self.run_name is None:
            raise ConfigError("role='runner' has no run to join; give run_name, or set RAYLIGHT_RUN")
        given = as_agent(agent if is_agent(agent) else self.agent)
        payload = RunnerPayload(given, self.tracer, self.hooks)
        return RemoteRunnerProcess(self.run_name, payload, self.runner, self.arguments)

    def _plan(
        self,
        algorithm: TrainerAlgorithm,
        agent: object,
        train_dataset: object,
        val_dataset: object,
        resume: Resume = False,
    ) -> RunSpec[Any, Any, Report]:
        """Return the run that a call of `fit` asks for, or raise a RaylightError if it could not work."""
        if agent is not None and self.agent is not None and train_dataset is None and not is_agent(agent):
            agent, train_dataset = None, agent  # fit(train_dataset)
        agent = agent if agent is not None else self.agent
        if isinstance(train_dataset, DevTaskLoader):
            self.initial_resources = train_dataset.resources | self.initial_resources
        name, folder = self._name_run()
        if isinstance(algorithm, SupervisedAlgorithm):
            given = (agent, train_dataset, val_dataset, self.train_dataset, self.val_dataset)
            check_unread(algorithm, given, self.rollout_arguments)
            return SupervisedRun.plan(name, folder, self.seed, algorithm, self.run_settings, resume)
        inputs = Inputs(
            as_agent(agent),
            train_dataset if train_dataset is not None else self.train_dataset,
            val_dataset if val_dataset is not None else self.val_dataset,
            agent,
        )
        settings, requested = self._agent_settings(inputs.agent, name, folder / "store.db"), self.run_settings
        if isinstance(algorithm, PolicyAlgorithm):
            check_no_proxy(algorithm, self.llm_proxy)
            return PolicyRun.plan(settings, algorithm, inputs, requested, self.adapter, resume)
        run = CustomRun.plan(settings, algorithm, inputs, requested, self.policy_arguments, resume)
        algorithm.set_trainer(self)
        algorithm.set_adapter(self.adapter or TracerTraceToTriplet())
        if self.llm_proxy is not None:
            algorithm.set_llm_proxy(self.llm_proxy)
        return run

    def _name_run(self) -> tuple[str, Path]:
        name = self.run_name or f"raylight-{_new_suffix()}"
        folder = Path(self.output_dir or f"{self.run_settings.outputs}/{name}")
        return name, folder.expanduser().absolute()

    def _agent_settings(self, agent: LitAgent, name: str, store: Path) -> RolloutSettings:
        """Return the settings that every run with an agent has.

        Args:
            store: file of the run's own store, in the run directory.
        """
        secret, resources = secrets.token_hex(16), merge_resources(agent, self.initial_resources)
        payload = RunnerPayload(agent, self.tracer, self.hooks, secret, name)
        return self._rollout_settings(payload, secret, resources, name, store)

    def _rollout_settings(
        self,
        agents: RunnerPayload | SessionConfig,
        secret: str,
        resources: NamedResources,
        name: str,
        store: Path,
    ) -> RolloutSettings:
        path = self.store.path if isinstance(self.store, StoreConfig) else None
        return RolloutSettings(
            name=name,
            folder=str(store.parent),
            seed=self.seed,
            runner=self.runner,
            agents=agents,
            secret=secret,
            store=self.store,
            store_path=path or str(store),
            resources=resources,
            group_reward=self.group_reward,
            serving=None,
        )

    def _launched(self, run: RunSpec[Any, Any, Report]) -> AbstractContextManager[Work]:
        """Return a context with the work of a planned run; see `launched`."""
        return launched(run, self.arguments, self._given, self.loggers)

    @property
    def _given(self) -> GivenSettings:
        process = {name: getattr(self.arguments, name) for name in PROCESS_ARGUMENTS}
        return GivenSettings(self.requested_settings, self.initial_resources, self.specs, process)


def _new_suffix() -> str:
    """Return a unique suffix for the name of a run, with the current time."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
