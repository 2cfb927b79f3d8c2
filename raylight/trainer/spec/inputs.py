"""Checks of the agent, the model and the datasets, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from raylight._utils.bounds import MAX_ROLLOUTS
from raylight._utils.broken_packages import check_packages
from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.components import build_component, import_dotted_name
from raylight.config import EngineConfig
from raylight.engines.registry import choose_engine
from raylight.errors import ConfigError, DatasetError, ModelNotFoundError, StoreError
from raylight.store.payloads import encode_payload
from raylight.tasks.datasets import as_task_set
from raylight.tasks.task_set import ShuffledTasks, TaskSet
from raylight.trainer.spec.settings import ServingSettings

MAX_CHECKED = 10_000
"""Number of tasks, the first ones, whose types are checked before the run. Enqueueing checks the others."""

GGUF_CONVERSION = (
    "AutoModelForCausalLM.from_pretrained({0}, gguf_file={1}).save_pretrained(NEW), and the same with "
    "AutoTokenizer"
)
"""Code that makes a Hugging Face folder of a GGUF file, in a folder."""


@dataclass(frozen=True)
class Inputs:
    """The agent and the datasets of a run."""

    agent: LitAgent
    train: object
    val: object
    agent_spec: object = None
    """The agent as specified, for config.yaml."""


def is_agent(value: object) -> bool:
    """Return True for an agent or a specification of one, False for a dataset."""
    if isinstance(value, type):
        return issubclass(value, LitAgent)
    return (
        isinstance(value, LitAgent | str)
        or callable(value)
        or (isinstance(value, Mapping) and "type" in value)
    )


def as_agent(spec: object) -> LitAgent:
    """Return the agent that `spec` specifies; a plain function is decorated with @rollout.

    Args:
        spec: a LitAgent, its class, a function, the dotted name of any of these, or a dict with the class as
            its `type`.

    Raises:
        ConfigError: `spec` is none of these.
    """
    if isinstance(spec, str):
        spec = import_dotted_name(spec, "agent")
    if isinstance(spec, Mapping) or (isinstance(spec, type) and issubclass(spec, LitAgent)):
        spec = build_component(spec, LitAgent, "agent")
    if isinstance(spec, LitAgent):
        return spec
    if callable(spec) and not isinstance(spec, type):
        return rollout(spec)
    raise ConfigError(
        f"agent is {spec!r:.80}; give a function decorated with @rollout or an instance of LitAgent (or its "
        "class, a dotted name, or a dict with a 'type')"
    )


def resolve_model(model: str) -> str:
    """Return the folder of a model: a path, or the cached folder of a hub name. Nothing is downloaded.

    Raises:
        ModelNotFoundError: the folder does not exist, or contains no model.
    """
    folder = os.path.abspath(os.path.expanduser(model))
    if gguf := _gguf_file(folder):
        raise ModelNotFoundError(
            f"{folder} has its weights in the format GGUF ({os.path.basename(gguf)}), which is not trained "
            "or served; give the folder of the original model, or convert this one: pip install gguf, then "
            f"{GGUF_CONVERSION.format(*map(repr, os.path.split(gguf)))}"
        )
    if os.path.isdir(folder):
        missing = [
            name
            for name in ("config.json", "tokenizer_config.json")
            if not os.path.isfile(os.path.join(folder, name))
        ]
        if missing:
            raise ModelNotFoundError(
                f"{folder} is not a Hugging Face model with a tokenizer: {', '.join(missing)} is missing"
            )
        return folder
    looks_like_name = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if looks_like_name:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return snapshot_download(model, local_files_only=True)
        except (LocalEntryNotFoundError, HFValidationError):
            raise ModelNotFoundError(
                f"there is no folder {folder}, and {model!r} is not in the local cache; download it with `hf "
                f"download {model}`"
            ) from None
    raise ModelNotFoundError(
        f"there is no model folder {folder}; give the path of one, or a hub name such as owner/name"
    )


def fixed_model(model: str, engine: EngineConfig) -> ServingSettings:
    """Return the settings of a model that is served unchanged.

    Args:
        model: folder, name in the local cache, or the upstream's name.

    Raises:
        ModelNotFoundError: the model does not exist.
        ConfigError: the engine is not installed.
        BrokenPackageError: see `check_packages`.
    """
    kind = choose_engine(engine)
    if kind == "upstream":
        update = {"kind": kind, "upstream_model": engine.upstream_model or model}
        return ServingSettings("", engine.model_copy(update=update))
    check_packages()
    return ServingSettings(resolve_model(model), engine.model_copy(update={"kind": kind}))


def _gguf_file(path: str) -> str | None:
    """Return the GGUF file that a path names, or the first of a folder without other weights."""
    if path.endswith(".gguf") and os.path.isfile(path):
        return path
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    files = [name for name in names if name.endswith(".gguf")]
    has_others = any(name.endswith((".safetensors", ".bin")) for name in names)
    return os.path.join(path, files[0]) if files and not has_others else None


class SourcedTasks(list[object]):
    """Tasks of several sources.

    Attributes:
        sources: name of the source of each.
    """

    def __init__(self, parts: list[tuple[str | None, object]]) -> None:
        super().__init__(task for _, task in parts)
        self.sources = [source for source, _ in parts]


def as_train_set(dataset: object) -> TaskSet:
    """Return the training dataset as a set of tasks.

    Raises:
        DatasetError: it is missing, cannot be iterated, is empty, or has too many tasks. A task cannot be
            stored.
    """
    if dataset is None:
        raise DatasetError("train_dataset is missing; pass a list of tasks")
    tasks = as_task_set(dataset, "train_dataset")
    if tasks.size is not None:
        _check_tasks([task for _, task in tasks.parts()[:MAX_CHECKED]], "train_dataset")
    return tasks


def as_tasks(dataset: object, name: str, required: bool) -> list[object]:
    """Return a dataset as a list of tasks; several sources as `SourcedTasks`.

    Args:
        name: of the argument, for messages.

    Raises:
        DatasetError: the dataset cannot be iterated, is empty or without an end, has too many tasks, or is
            required and None. A task cannot be stored.
    """
    if dataset is None:
        if required:
            raise DatasetError(f"{name} is missing; pass a list of tasks")
        return []
    found = as_task_set(dataset, name)
    tasks = list(found.tasks) if isinstance(found, ShuffledTasks) else SourcedTasks(found.parts())
    _check_tasks(tasks[:MAX_CHECKED], name)
    return tasks


def _check_tasks(tasks: list[object], name: str) -> None:
    """Raise a DatasetError if a task cannot be stored."""
    for index, task in enumerate(tasks):
        try:
            encode_payload(task, f"{name}[{index}]")
        except StoreError as error:
            raise DatasetError(str(error)) from error


def check_validation_size(n_tasks: int, samples: int, setting: str) -> None:
    """Raise an error if one validation has too many rollouts.

    Args:
        setting: name of the setting with the rollouts per task, for the message.

    Raises:
        ConfigError: there are more than `MAX_ROLLOUTS`.
    """
    if n_tasks * samples > MAX_ROLLOUTS:
        raise ConfigError(
            f"{setting}={samples} with {n_tasks} tasks is more than {MAX_ROLLOUTS:,} rollouts, which are in "
            f"memory together; lower {setting}, or pass fewer tasks"
        )
