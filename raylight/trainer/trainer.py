"""The Trainer: what a user calls."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from raylight.agent.hooks import Hook, HookDispatcher
from raylight.agent.resources import NamedResources
from raylight.algorithms.base import Algorithm, BaseAlgorithm, FastAlgorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.components import build_component
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.errors import ConfigError, RaylightError
from raylight.store.client import StoreClient
from raylight.traces.adapters import TraceAdapter
from raylight.traces.tracer import OtelTracer, Tracer
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.blocking import run_blocking
from raylight.trainer.cluster import ray_session
from raylight.trainer.display import make_display
from raylight.trainer.eval_run import EvalRun
from raylight.trainer.eval_session import EvalSettings
from raylight.trainer.inputs import Inputs, as_agent, as_tasks, is_agent
from raylight.trainer.join_run import RemoteRunnerProcess, must_be_joinable
from raylight.trainer.report import Report
from raylight.trainer.resume import Resume
from raylight.trainer.runs import AlgorithmRun, PolicyRun, Run

Trains = PolicyAlgorithm | Algorithm
Role = Literal["both", "algorithm", "runner"]


class Trainer:
    """Trains an agent on a Ray cluster, or on a local one that it starts.

    Components (`algorithm`, `agent`, `tracer`, `adapter`, `llm_proxy`, each of `hooks`) may be given as an instance, a class, a
    dotted name, or `{"type": ..., **arguments}`. An argument that nothing would read is an error.

    Args:
        algorithm: what to train and how, for example `GRPO(model=...)`, or an `Algorithm` with a `run` of its own.
        agent: what to train; may be given to `fit` instead.
        train_dataset, val_dataset: may be given to `fit` instead.
        num_epochs: passes over the training tasks, for an algorithm that has `n_epochs`.
        output_dir: the run directory; a new one under `outputs/` if None.
        initial_resources, resources: named resources for the agent, over those that it declares. Two words for the same.
        n_runners, n_workers: RunnerActors; short for `runner={"n": ...}`. Two words for the same.
        max_rollouts: rollouts after which a runner ends; short for `runner={"max_rollouts": ...}`.
        n_learners: learner ranks; short for `learner={"n": ...}`.
        port: HTTP port of the model; short for `engine={"port": ...}`.
        engine, runner, learner: settings of the components, as a dict or as EngineConfig, RunnerConfig, LearnerConfig.
        checkpoint: when and where training states are kept, from which `fit(resume=...)` goes on; a dict or a CheckpointConfig.
        store: settings of the run's store (dict or StoreConfig), or the client of one that is there already.
        tracer: catches spans inside the agent; an OtelTracer if None.
        adapter: makes training data of spans for an `Algorithm`; a TracerTraceToTriplet if None or a dict without a `type`. To GRPO
            and its kin it gives only `agent_match`, since they train on the tokens that the engine recorded.
        llm_proxy: handed to an `Algorithm`, which knows what it is.
        hooks: called around every rollout; one, or several in their order.
        role: "algorithm" leaves the runners to other processes on the cluster, and "runner" is such a process: its `fit` executes
            the rollouts of the run `run_name` until that is over. None: what `RAYLIGHT_ROLE` says, or "both".
        run_name: by which the processes of a run find one another; None: what `RAYLIGHT_RUN` says, or a new name.
        dev: `fit` and `train` do what `dev` does.
        seed: of task order and of sampling; 0 if None.
        address: of the Ray cluster; None joins the one at `RAY_ADDRESS` or on this machine, or starts a local one.
        progress: show steps while the run goes on, and a summary at its end; False also silences `Baseline`.
        log_to_driver: print what actors print; otherwise their logs are in the dashboard and `ray logs`.

    Raises:
        ConfigError: a setting is unknown, does not fit, or would not be read.
    """

    def __init__(
        self,
        *,
        algorithm: Trains | type[Trains] | str | dict[str, Any] | None = None,
        agent: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        num_epochs: int | None = None,
        output_dir: str | Path | None = None,
        initial_resources: NamedResources | None = None,
        resources: NamedResources | None = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
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
        role: Role | None = None,
        run_name: str | None = None,
        dev: bool = False,
        seed: int | None = None,
        address: str | None = None,
        progress: bool = True,
        log_to_driver: bool = False,
    ) -> None:
        self.algorithm: Trains | None = _algorithm(algorithm, num_epochs)
        self.agent = agent
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.initial_resources = _named(
            one_of("initial_resources", initial_resources, "resources", resources)
        )
        self.runner = RunnerConfig.parse(
            runner, n=one_of("n_runners", n_runners, "n_workers", n_workers), max_rollouts=max_rollouts
        )
        self.role, self.run_name = _role(role, run_name)
        if self.role == "algorithm":
            self.runner = self.runner.model_copy(update={"external": True})
        self.store = _store(store)
        self.tracer: Tracer = build_component(tracer, Tracer, "tracer", default=OtelTracer)
        self.adapter: TraceAdapter[Any] | None = (
            None
            if adapter is None
            else build_component(adapter, TraceAdapter, "adapter", dict_default=TracerTraceToTriplet)  # type: ignore[type-abstract]
        )
        self.llm_proxy = None if llm_proxy is None else build_component(llm_proxy, object, "llm_proxy")
        self.hooks = _hooks(hooks)
        given = RunSettings(
            EngineConfig.parse(engine, port=port),
            LearnerConfig.parse(learner, n=n_learners),
            CheckpointConfig.parse(checkpoint),
            seed,
            output_dir,
        )
        self.run_settings = (
            self.algorithm.adjust_run_settings(given)
            if isinstance(self.algorithm, PolicyAlgorithm)
            else given
        )
        """What the arguments and the algorithm make of engine, learners and run directory."""
        self.engine, self.learner = self.run_settings.engine, self.run_settings.learner
        self.checkpoint = self.run_settings.checkpoint
        self.seed, self.output_dir = self.run_settings.seed or 0, self.run_settings.output_dir
        self._dev = dev
        self._address = address
        self.progress = progress
        self._log_to_driver = log_to_driver
        only_policy = {
            "engine": engine,
            "learner": learner,
            "checkpoint": checkpoint,
            "n_learners": n_learners,
            "port": port,
            "seed": seed,
        }
        self.given_for_policy = sorted(name for name, value in only_policy.items() if value is not None)
        """Arguments that only an algorithm that trains a policy would read."""

    def fit(
        self,
        agent: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        val_data: Any = None,
        resume: Resume = False,
    ) -> dict[str, Any]:
        """Train the agent; returns the summary that is also in `summary.json`.

        Works in a script, in a notebook cell and in a Ray job. Whatever happens, no actor, deployment or placement group of the
        run remains, and a cluster that was there before stays up.

        Args:
            agent: decorated function or LitAgent, or what describes one; where the Trainer has one, the training dataset may come
                first instead.
            train_dataset: tasks, each given to the agent as it is; anything picklable.
            val_dataset, val_data: tasks on which progress is measured; never trained on. Two words for the same.
            resume: "auto" goes on with the run in `output_dir` if it left a training state, and begins anew if not; with True there
                must be one. A path names the state, or the run, to go on from. No rollout is trained twice, and none that was
                finished is lost: the steps since the state are taken again with those that the store has. Settings may differ, but
                not the model, the algorithm or the adapter.

        Raises:
            RaylightError: one of `raylight.errors`, which names what to do.
        """
        if self.role == "runner":
            return self._runners(agent)
        val = one_of("val_dataset", val_dataset, "val_data", val_data)
        return self._blocking(self._chosen_algorithm(), agent, train_dataset, val, resume)

    async def train(
        self,
        agent: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        val_data: Any = None,
        resume: Resume = False,
    ) -> dict[str, Any]:
        """`fit` for a caller that is asynchronous itself; cancelling it stops the run and cleans up."""
        if self.role == "runner":
            return await RemoteRunnerProcess(self, agent if is_agent(agent) else None).work()
        algorithm = self._chosen_algorithm()
        val = one_of("val_dataset", val_dataset, "val_data", val_data)
        with self._run(algorithm, agent, train_dataset, val, resume) as run:
            return run.finish(await run.work())

    def dev(
        self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None, *, val_data: Any = None
    ) -> dict[str, Any]:
        """Try the agent out with a fast algorithm, by default `Baseline`, which runs it on samples and shows what it did.

        Raises:
            TypeError: the Trainer's algorithm is not a FastAlgorithm.
        """
        if self.role == "runner":
            return self._runners(agent)
        val = one_of("val_dataset", val_dataset, "val_data", val_data)
        return self._blocking(self._fast_algorithm(), agent, train_dataset, val)

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
        """Score a model on tasks; returns the figures that are also in `eval.json`. Nothing is trained: there are no learners.

        Args:
            agent: as for `fit`.
            dataset: tasks; the Trainer's `val_dataset` if None.
            model: folder or name; the algorithm's if None.
            lora_adapter: folder of a LoRA adapter in peft's format.
            samples: rollouts of each task.
            settings: others of `raylight.trainer.eval_session.EvalSettings`, such as `sampling={"temperature": 0.0}`.

        Raises:
            RaylightError: one of `raylight.errors`, which names what to do.
        """
        if self.role != "both":
            raise ConfigError(
                "nothing reads role: an evaluation has its runners itself; leave role and RAYLIGHT_ROLE out"
            )
        model = model or getattr(self.algorithm, "model", None)
        if model is None:
            raise ConfigError("there is no model to score: give model=...")
        tasks = as_tasks(dataset if dataset is not None else self.val_dataset, "dataset", required=True)
        chosen = EvalSettings(model=model, lora_adapter=lora_adapter, samples=samples, **settings)
        folder = Path(self.output_dir or f"outputs/eval-{_stamp()}").expanduser().absolute()
        try:
            run = EvalRun(self, as_agent(agent if agent is not None else self.agent), tasks, chosen, folder)
            return run.run(self._address, self._log_to_driver)
        except RaylightError as error:
            raise error.with_traceback(None) from None

    def _runners(self, agent: Any) -> dict[str, Any]:
        try:
            return run_blocking(RemoteRunnerProcess(self, agent if is_agent(agent) else None).work())
        except RaylightError as error:
            raise error.with_traceback(None) from None

    def _chosen_algorithm(self) -> Trains:
        if self._dev:
            return self._fast_algorithm()
        if self.algorithm is None:
            raise ConfigError(
                "the Trainer has no algorithm; give it one, such as GRPO(model=...), or call dev() to try the agent"
            )
        return self.algorithm

    def _fast_algorithm(self) -> FastAlgorithm:
        algorithm = Baseline() if self.algorithm is None else self.algorithm
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                f"dev() needs a FastAlgorithm, such as Baseline, and not {type(algorithm).__name__}"
            )
        return algorithm

    def _blocking(
        self, algorithm: Trains, agent: Any, train_dataset: Any, val_dataset: Any, resume: Resume = False
    ) -> dict[str, Any]:
        try:
            with self._run(algorithm, agent, train_dataset, val_dataset, resume) as run:
                return run.finish(run_blocking(run.work()))
        except RaylightError as error:
            raise error.with_traceback(None) from None  # our own frames would hide the message

    @contextlib.contextmanager
    def _run(
        self, algorithm: Trains, agent: Any, train_dataset: Any, val_dataset: Any, resume: Resume
    ) -> Iterator[Run]:
        """A run that is checked and planned, with a connection to Ray and a display."""
        started = time.perf_counter()
        if agent is not None and self.agent is not None and train_dataset is None and not is_agent(agent):
            agent, train_dataset = None, agent  # fit(train_dataset)
        inputs = Inputs(
            as_agent(agent if agent is not None else self.agent),
            train_dataset if train_dataset is not None else self.train_dataset,
            val_dataset if val_dataset is not None else self.val_dataset,
        )
        name = self.run_name or f"raylight-{_stamp()}"
        folder = Path(self.output_dir or f"{self.run_settings.outputs}/{name}").expanduser().absolute()
        kind = PolicyRun if isinstance(algorithm, PolicyAlgorithm) else AlgorithmRun
        run: Run = kind(self, algorithm, inputs, name, folder)  # type: ignore[arg-type]
        run.resume(resume)
        display = make_display(self.progress, run.total_steps)
        with ray_session(self._address, self._log_to_driver) as ray, display as shown:
            if self.runner.external:
                must_be_joinable(name, ray.local)
            run.finalize_plan()
            run.begin(Report(folder, shown, run.resolved(), started, run.after), ray.local)
            run.report.stage(f"run {name}; Ray dashboard: {ray.dashboard or 'see the cluster'}")
            yield run


def _stamp() -> str:
    """Tells runs apart."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of an argument that has two names.

    Raises:
        ConfigError: both are given, and differ.
    """
    if (
        value is not None
        and other is not None
        and value is not other
        and not (isinstance(value, int) and value == other)
    ):
        raise ConfigError(f"{name} and {other_name} mean the same; give one of them")
    return value if value is not None else other


def _role(role: Role | None, run_name: str | None) -> tuple[Role, str | None]:
    """What this process does of a run, and the run's name, from the arguments or else the environment.

    Raises:
        ConfigError: there is no such role, or nothing would read the name.
    """
    chosen = role or os.environ.get("RAYLIGHT_ROLE") or "both"
    if chosen not in get_args(Role):
        raise ConfigError(f"role (or RAYLIGHT_ROLE) is one of {', '.join(get_args(Role))}, not {chosen!r}")
    if chosen == "both" and run_name is not None:
        raise ConfigError(
            "nothing reads run_name: algorithm and runners are in one run of this process; give a role too"
        )
    return cast("Role", chosen), run_name or (
        os.environ.get("RAYLIGHT_RUN") or None if chosen != "both" else None
    )


def _named(resources: Any) -> NamedResources:
    """Raise ConfigError for resources without names."""
    if resources is not None and not isinstance(resources, Mapping):
        raise ConfigError(
            f"resources are given by name, as in {{'llm': LLM(...)}}, not as {type(resources).__name__}"
        )
    return dict(resources or {})


def _hooks(given: Any) -> tuple[Hook, ...]:
    """One hook or several, each of which may be described; raises HookError now for what would be refused in every runner."""
    several = isinstance(given, Iterable) and not isinstance(given, type | str | Mapping | Hook)
    hooks: tuple[Any, ...] = tuple(given) if several else () if given is None else (given,)
    made = tuple(build_component(hook, object, "hooks") for hook in hooks)
    HookDispatcher(made)
    return cast("tuple[Hook, ...]", made)


def _store(given: Any) -> StoreConfig | StoreClient:
    """The settings of a store, or the client of one that other processes can reach.

    Raises:
        ConfigError: it is neither.
    """
    is_settings = (
        given is None or isinstance(given, StoreConfig) or (isinstance(given, dict) and "type" not in given)
    )
    if is_settings:
        return StoreConfig.parse(given)
    if not isinstance(given, StoreClient):
        raise ConfigError(
            f"store takes a dict of settings ({', '.join(StoreConfig.model_fields)}), a StoreConfig, or the StoreClient of a store "
            f"that is there already, not {given!r:.80}"
        )
    if given.is_in_process:
        raise ConfigError(
            "this store is an object of this process, which runners cannot reach; give the client of a StoreActor"
        )
    return given


def _algorithm(given: Any, num_epochs: int | None) -> Trains | None:
    """The algorithm, with another number of epochs if that was given.

    Raises:
        ConfigError: it is none, or would not read `num_epochs`.
    """
    algorithm: Any = None if given is None else build_component(given, BaseAlgorithm, "algorithm")
    if num_epochs is None:
        return algorithm
    if algorithm is None:
        raise ConfigError("nothing reads num_epochs: the Trainer has no algorithm")
    if not hasattr(algorithm, "n_epochs"):
        raise ConfigError(f"nothing reads num_epochs: {type(algorithm).__name__} has no n_epochs")
    if isinstance(algorithm, PolicyAlgorithm):
        if algorithm.n_steps is not None:
            raise ConfigError(
                "num_epochs and the algorithm's n_steps both say how long to train; give one of them"
            )
        return algorithm.with_epochs(num_epochs)
    algorithm.n_epochs = num_epochs
    return algorithm
