"""Checks before anything starts: the agent, the model, the datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raylight.agent.decorators import rollout
from raylight.agent.litagent import LitAgent
from raylight.components import build_component, import_dotted_name
from raylight.errors import ConfigError, DatasetError, ModelNotFoundError


@dataclass(frozen=True)
class Inputs:
    """What a run is given."""

    agent: LitAgent
    train: Any
    val: Any


def is_agent(given: Any) -> bool:
    """Whether it is an agent or describes one, and is no dataset."""
    if isinstance(given, type):
        return issubclass(given, LitAgent)
    return (
        isinstance(given, LitAgent | str)
        or callable(given)
        or (isinstance(given, Mapping) and "type" in given)
    )


def as_agent(given: Any) -> LitAgent:
    """The agent; a plain function is decorated, and one that is described is made.

    Args:
        given: a LitAgent, its class, a function, the dotted name of any of these, or a dict with the class as its `type`.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(given, str):
        given = import_dotted_name(given, "agent")
    if isinstance(given, Mapping) or (isinstance(given, type) and issubclass(given, LitAgent)):
        given = build_component(given, LitAgent, "agent")
    if isinstance(given, LitAgent):
        return given
    if callable(given) and not isinstance(given, type):
        return rollout(given)
    raise ConfigError(
        f"agent must be a function decorated with @rollout or an instance of LitAgent (or its class, a dotted name, or a dict with "
        f"a 'type'), not {given!r:.80}"
    )


def resolve_model(model: str) -> str:
    """The folder of a model: a path as it is, or a hub name that is in the local cache. Nothing is downloaded.

    Raises:
        ModelNotFoundError: there is no such folder, or it holds no model.
    """
    folder = os.path.abspath(os.path.expanduser(model))
    if os.path.isdir(folder):
        missing = [
            name
            for name in ("config.json", "tokenizer_config.json")
            if not os.path.isfile(os.path.join(folder, name))
        ]
        if missing:
            raise ModelNotFoundError(
                f"{folder} holds no Hugging Face model with a tokenizer: {', '.join(missing)} is missing"
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
                f"there is no folder {folder}, and {model!r} is not in the local cache; fetch it first with `hf download {model}`"
            ) from None
    raise ModelNotFoundError(f"there is no model folder {folder}")


def as_tasks(dataset: Any, name: str, required: bool) -> list[Any]:
    """A dataset as a list of tasks.

    Raises:
        DatasetError: it cannot be iterated, or it is required and empty.
    """
    dataset = as_dataset(dataset, name)
    if dataset is None:
        if required:
            raise DatasetError(f"{name} is missing; pass a list of tasks")
        return []
    return list(dataset) if isinstance(dataset, Iterable) else [dataset[i] for i in range(len(dataset))]


def as_dataset(dataset: Any, name: str) -> Any:
    """A dataset as it is, once it is known to hold tasks; what can be read only once becomes a list.

    Raises:
        DatasetError: it cannot be iterated, or it is empty.
    """
    if dataset is None:
        return None
    sized = hasattr(dataset, "__getitem__") and hasattr(
        dataset, "__len__"
    )  # a torch Dataset, which need not be iterable
    if isinstance(dataset, str | bytes | dict) or not (sized or isinstance(dataset, Iterable)):
        raise DatasetError(
            f"{name} is a {type(dataset).__name__}; pass a list (or another sequence) of tasks"
        )
    dataset = dataset if sized else list(dataset)
    if len(dataset) == 0:
        raise DatasetError(f"{name} is empty; pass at least one task")
    return dataset
