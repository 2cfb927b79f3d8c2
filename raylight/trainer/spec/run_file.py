"""Run files: YAML files with all settings of a run, which `raylight train` reads and every run writes.

`RunFile` is the schema. The `config.yaml` of a run is such a file and starts the same run again. A value that
was given in code and cannot be expressed in YAML is written as `IN_CODE`; reading it raises an error that
names the replacement. Secrets are never written: they become `SECRET`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import raylight
from raylight import algorithms
from raylight._utils.bounds import Seed
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import LLM, NamedResources, ProxyLLM
from raylight.algorithms.base import Algorithm, BaseAlgorithm, FastAlgorithm
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.base_config import Config
from raylight.components import (
    IN_CODE,
    NotImportedError,
    build_component,
    dotted_name,
    import_dotted_name,
    names_only,
)
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.errors import ConfigError
from raylight.trainer.spec.assignments import apply_assignment, set_nested
from raylight.trainer.spec.task_files import FileTasks, read_tasks
from raylight.types import JsonObject

SECRET = "**********"
UPSTREAM_KEY = "RAYLIGHT_UPSTREAM_KEY"
COMPONENTS = ("tracer", "adapter", "llm_proxy", "hooks", "group_reward", "loggers")
"""Arguments of a Trainer that specify components."""
RESOURCE_TYPES = {"llm": LLM, "proxy_llm": ProxyLLM, "prompt_template": PromptTemplate}


class DataFiles(Config):
    """Tasks: paths of .jsonl, .json or .parquet files, or dotted names of lists or of functions that return
    lists."""

    train: str | None = None
    val: str | None = None


class RunFile(Config):
    """All settings of a run. Fields have the meaning of the arguments of `Trainer`."""

    agent: str | JsonObject | None = None
    """Dotted name of the agent, or a dict of the dotted name of its class as `type` with arguments.
    An algorithm without rollouts has none."""
    data: DataFiles = DataFiles()
    algorithm: JsonObject
    """Name of the algorithm as `name` (a public name such as GRPO, or a dotted name) with its settings."""
    seed: Seed | None = None
    output_dir: str | None = None
    resources: JsonObject | None = None
    """Initial resources by name; a dict with `resource_type` (llm, proxy_llm, prompt_template) is a resource
    of this type."""
    engine: EngineConfig | None = None
    learner: LearnerConfig | None = None
    runner: RunnerConfig | None = None
    checkpoint: CheckpointConfig | None = None
    store: StoreConfig | None = None
    tracer: str | JsonObject | None = None
    adapter: str | JsonObject | None = None
    llm_proxy: str | JsonObject | None = None
    hooks: str | JsonObject | list[str | JsonObject] | None = None
    group_reward: str | JsonObject | None = None
    loggers: list[str | JsonObject] | None = None
    address: str | None = None
    progress: bool = True
    ui: bool = False
    log_to_driver: bool = False
    run: JsonObject | None = None
    """Facts about a run, which it writes to its config.yaml and which are not read: name, versions, total
    steps."""

    def trainer_arguments(self, components: Sequence[str] = COMPONENTS) -> JsonObject:
        """Return the arguments for `Trainer`.

        Args:
            components: those that are among the arguments.

        Raises:
            ConfigError: a setting is wrong, or the algorithm cannot be imported.
        """
        optional = ("engine", "learner", "runner", "checkpoint", "store", "seed", *components)
        settings = {name: getattr(self, name) for name in optional}
        return {
            "agent": self.agent,
            "algorithm": build_algorithm(self.algorithm),
            "initial_resources": _read_resources(self.resources),
            "output_dir": self.output_dir,
            "address": self.address,
            "progress": self.progress,
            "ui": self.ui,
            "log_to_driver": self.log_to_driver,
            **{name: value for name, value in settings.items() if value is not None},
        }

    def read_data(self) -> tuple[FileTasks | None, FileTasks | None]:
        """Return the training tasks and the validation tasks; None for an algorithm that has its examples.

        Raises:
            ConfigError: there is no training data, or a dotted name names no tasks.
            DatasetError: a file cannot be read.
        """
        if isinstance(build_algorithm(self.algorithm), SupervisedAlgorithm) and self.data == DataFiles():
            return None, None
        if self.data.train is None:
            raise ConfigError(
                "data.train is missing: there are no tasks; give a .jsonl file, or the dotted name of a list "
                "of tasks, as data.train in the file or as --data"
            )
        val = read_data(self.data.val, "data.val") if self.data.val else None
        return read_data(self.data.train, "data.train"), val

    def resolved(self) -> JsonObject:
        """Return the file's content with all defaults, without `run` and without secrets.

        Nothing is imported: the settings of an algorithm that a dotted name stands for remain as given.
        """
        content = self.model_dump(mode="json", exclude={"run"})
        algorithm: object = None
        with names_only(), contextlib.suppress(NotImportedError):
            algorithm = build_algorithm(self.algorithm)
        if isinstance(algorithm, PolicyAlgorithm | SupervisedAlgorithm):
            content["algorithm"] = describe_algorithm(algorithm)
        if content["resources"] is not None:
            content["resources"] = describe_resources(_read_resources(self.resources))
        return {name: value for name, value in content.items() if value is not None}


def planned_trainer(run_file: RunFile, show: Callable[[str], None]) -> raylight.Trainer:
    """Return a Trainer of a file's settings, for a plan of its memory.

    Nothing that the file names is imported, except the group rewards of raylight.

    Args:
        show: receives a note on a group reward that is left out.

    Raises:
        ConfigError: a setting is wrong, or the algorithm or the engine has a dotted name.
    """
    names = {
        f"{home}{mark}{name}"
        for name in dir(raylight.rewards)
        for home in ("raylight.rewards", "raylight")  # the latter until 1.0
        for mark in ".:"
    }
    with names_only(names):
        try:
            return raylight.Trainer(**run_file.trainer_arguments(["group_reward"]))
        except NotImportedError as error:
            trainer = raylight.Trainer(**run_file.trainer_arguments([]))
            show(f"the plan is without models of the group reward: {error}")
            return trainer


def build_algorithm(given: JsonObject) -> PolicyAlgorithm | SupervisedAlgorithm | Algorithm:
    """Return an algorithm from its name and its settings.

    Raises:
        ConfigError: a setting is wrong, or the algorithm cannot be imported.
    """
    settings = dict(given)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("algorithm.name is missing; give a name such as GRPO, or a dotted name")
    if ":" in name or "." in name:
        found = import_dotted_name(name, "algorithm.name")
    else:
        names = _algorithm_names()
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names
            raise ConfigError(f"algorithm.name: there is no {name!r}; the nearest are: {', '.join(nearest)}")
        found = getattr(algorithms, name)
    if isinstance(found, type) and "model" not in settings:
        parameter = inspect.signature(found).parameters.get("model")
        if parameter is not None and parameter.default is parameter.empty:
            raise ConfigError(
                f"algorithm.model is missing: {name} trains a model; give its folder as algorithm.model in "
                "the file or as --model"
            )
    spec = found if isinstance(found, BaseAlgorithm) and not settings else {"type": found, **settings}
    return build_component(spec, BaseAlgorithm, "algorithm")  # type: ignore[return-value]


def load_run_file(
    source: str | Path, assignments: Sequence[str] = (), options: Mapping[str, object] | None = None
) -> RunFile:
    """Read a run file, or make one for an agent.

    Args:
        source: a YAML file; or an agent, `package.module:agent` or `path/to/file.py:agent`, which is trained
            with GRPO unless the settings say otherwise.
        assignments: texts `NAME=VALUE` that override settings of the file.
        options: further settings by their dotted names, which `assignments` override; None sets nothing.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or a wrong value, or a value that was given
            in code.
    """
    values = _agent_settings(str(source)) if _is_agent(source) else _read_settings(Path(source).expanduser())
    for name, value in (options or {}).items():
        if value is not None:
            set_nested(values, name.split("."), value, name)
    for text in assignments:
        apply_assignment(values, text, sections=list(RunFile.model_fields))
    for name in values.keys() - {"run"}:
        _check_expressible(values[name], name, str(source))
    engine = values.get("engine")
    if isinstance(engine, dict) and engine.get("api_key") == SECRET:
        if UPSTREAM_KEY not in os.environ:
            raise ConfigError(
                f"{source}: engine.api_key is a secret, which is not written; set {UPSTREAM_KEY} to the key"
            )
        values["engine"] = engine | {"api_key": os.environ[UPSTREAM_KEY]}
    return RunFile(**values)


def _is_agent(source: str | Path) -> bool:
    return ":" in str(source) and not Path(source).expanduser().exists()


def _agent_settings(agent: str) -> JsonObject:
    """Return the settings of a run that trains an agent; a file is named by its absolute path."""
    module, _, name = agent.partition(":")
    if module.endswith(".py"):
        agent = f"{Path(module).expanduser().absolute()}:{name}"
    return {"agent": agent, "algorithm": {"name": "GRPO"}}


def _read_settings(path: Path) -> JsonObject:
    """Return the settings of a YAML file.

    Raises:
        ConfigError: it cannot be read, or has no settings.
    """
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a Python file; add the agent's name, as in {path}:agent")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the path of a YAML file, or an agent, as "
            "package.module:agent or path/to/file.py:agent"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no settings; write at least agent, data and algorithm")
    return values


def _check_expressible(value: object, name: str, path: str) -> None:
    """Raise a ConfigError if a setting, or one inside it, was given in code."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_expressible(inner, f"{name}.{key}", path)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_expressible(inner, f"{name}[{index}]", path)
    elif isinstance(value, str) and value.startswith("__main__:"):
        raise ConfigError(
            f"{path}: {name} was defined in __main__, a script or a notebook; move it to a module and "
            f"give {name}: package.module:name"
        )
    elif value == IN_CODE:
        hint = "a file or a dotted name" if name.startswith("data") else "a dotted name or settings"
        raise ConfigError(f"{path}: {name} was given in code and could not be written; give {hint} as {name}")
    elif value == SECRET and name.startswith("resources"):
        raise ConfigError(f"{path}: {name} is a secret, which is not written; give it with --set {name}=...")


def _algorithm_names() -> list[str]:
    """Return the public names of raylight that are algorithms with a constructor."""
    public = {name: getattr(algorithms, name) for name in dir(algorithms)}
    bases = (Algorithm, FastAlgorithm, PolicyAlgorithm, SupervisedAlgorithm)
    return sorted(
        name
        for name, item in public.items()
        if isinstance(item, type) and issubclass(item, BaseAlgorithm) and item not in bases
    )


def read_data(source: str | Path, name: str, limit: int | None = None) -> FileTasks:
    """Return the tasks of a file, or of a dotted name of a list or of a function without arguments.

    Args:
        name: of the setting, for messages.
        limit: maximum number of tasks, from the start; None takes all.
    """
    if isinstance(source, Path) or ":" not in source or Path(source).expanduser().exists():
        return read_tasks(source, limit)
    tasks = import_dotted_name(source, name)
    tasks = tasks() if callable(tasks) else tasks
    if not isinstance(tasks, list | tuple) or not tasks:
        raise ConfigError(
            f"{name}: {source} has no tasks; name a list of tasks, or a function that returns one"
        )
    return FileTasks(list(tasks)[:limit], source if limit is None else None)


def _read_resources(resources: JsonObject | None) -> NamedResources:
    """Return resources of their types."""
    built = {}
    for name, value in (resources or {}).items():
        kind = value.get("resource_type") if isinstance(value, dict) else None
        if kind is not None and kind not in RESOURCE_TYPES:
            raise ConfigError(
                f"resources.{name}.resource_type is {kind!r}; choose one of {', '.join(RESOURCE_TYPES)}"
            )
        try:
            built[name] = RESOURCE_TYPES[kind](**value) if kind is not None else value
        except ValueError as error:
            raise ConfigError(f"resources.{name}: {' '.join(str(error).split())}") from None
    return built


# what a run writes


def describe_algorithm(algorithm: PolicyAlgorithm | SupervisedAlgorithm | Algorithm) -> JsonObject:
    """Return the name and the settings of an algorithm, from which `RunFile` builds it again."""
    cls = type(algorithm)
    name = cls.__name__ if getattr(algorithms, cls.__name__, None) is cls else dotted_name(algorithm)
    if name == IN_CODE:
        name = f"{cls.__module__}:{cls.__qualname__}"
    if isinstance(algorithm, SupervisedAlgorithm):
        sources = {key: _describe_source(getattr(algorithm, key)) for key in ("data", "val_data")}
        return {"name": name, **sources, **algorithm.arguments()}
    settings = algorithm.arguments() if isinstance(algorithm, PolicyAlgorithm) else algorithm.resolved()
    return {"name": name, **settings}


def _describe_source(source: object) -> str | None:
    """Return examples as a file, a run directory or a dotted name, `IN_CODE` if they are not one of these."""
    if source is None:
        return None
    if not isinstance(source, str | Path):
        return IN_CODE
    path = Path(source).expanduser()
    return str(path.absolute()) if path.exists() else str(source)


def describe_resources(resources: NamedResources) -> JsonObject:
    """Return resources as YAML values, without API keys."""
    described = {}
    for name, value in resources.items():
        if isinstance(value, LLM | PromptTemplate):
            described[name] = value.model_dump(mode="json")
            if described[name].get("api_key") not in (None, "unused"):
                described[name]["api_key"] = SECRET
        else:
            described[name] = describe_component(value, is_data=True)
    return described


def describe_data(dataset: object) -> str | None:
    """Return the source of a dataset: None without one, `IN_CODE` if its tasks are not from a file."""
    return None if dataset is None else getattr(dataset, "path", None) or IN_CODE


def describe_component(spec: object, is_data: bool = False) -> Any:
    """Return the specification of a component as YAML values; `IN_CODE` if it has no such form.

    Args:
        is_data: True for a value that is not a component, such as a resource.
    """
    if isinstance(spec, type) or callable(spec):
        return dotted_name(spec)
    if isinstance(spec, dict):
        return {key: describe_component(value, is_data) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return [describe_component(value, is_data) for value in spec]
    return spec if spec is None or isinstance(spec, str | int | float | bool) else dotted_name(spec)
