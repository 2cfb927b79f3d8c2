"""Checks of a Trainer's arguments, and their conversion to components and settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import Field

from raylight._utils.bounds import MAX_COUNT, Seed
from raylight.agent.hooks import Hook, HookDispatcher
from raylight.agent.resources import NamedResources
from raylight.algorithms.base import Algorithm, BaseAlgorithm, FastAlgorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.base_config import Config
from raylight.components import build_component, import_dotted_name
from raylight.config import StoreConfig
from raylight.errors import ConfigError
from raylight.rewards.group import GroupReward
from raylight.store.client import StoreClient


class TrainerArguments(Config):
    """Arguments of a Trainer that are plain values; `Trainer` documents them."""

    num_epochs: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    output_dir: str | Path | None = None
    run_name: str | None = None
    dev: bool = False
    seed: Seed | None = None
    address: str | None = None
    progress: bool = True
    ui: bool = False
    log_to_driver: bool = False


PROCESS_ARGUMENTS = ("address", "progress", "ui", "log_to_driver")
"""Arguments about the Trainer's own process."""
TrainerAlgorithm = PolicyAlgorithm | SupervisedAlgorithm | Algorithm
Role = Literal["both", "algorithm", "runner"]


@dataclass(frozen=True)
class GivenSettings:
    """Arguments of a Trainer from which config.yaml is written."""

    settings: RunSettings
    """Before the algorithm adjusts them."""
    resources: NamedResources
    components: dict[str, object]
    """Components as specified, by the name of the argument."""
    process: dict[str, object]
    """Values of `PROCESS_ARGUMENTS`."""


def parse_role(role: Role | None, run_name: str | None) -> tuple[Role, str | None]:
    """Return the role of this process and the run's name, from the arguments or the environment.

    Raises:
        ConfigError: the role is unknown, or nothing would read the name.
    """
    chosen = role or os.environ.get("RAYLIGHT_ROLE") or "both"
    if chosen not in get_args(Role):
        raise ConfigError(f"role (or RAYLIGHT_ROLE) is {chosen!r}; choose one of {', '.join(get_args(Role))}")
    if chosen == "both":
        if run_name is not None:
            raise ConfigError(
                "nothing reads run_name: this process has algorithm and runners; give a role too"
            )
        return "both", None
    return cast("Role", chosen), run_name or os.environ.get("RAYLIGHT_RUN") or None


def parse_resources(resources: object) -> NamedResources:
    """Return resources by name.

    Raises:
        ConfigError: they are not a mapping.
    """
    if resources is not None and not isinstance(resources, Mapping):
        raise ConfigError(
            f"resources is a {type(resources).__name__}; give them by name, as in {{'llm': LLM(...)}}"
        )
    return dict(resources or {})


def parse_hooks(hooks: Any) -> tuple[Hook, ...]:
    """Return hooks from one hook or several, each of them an instance or a specification.

    Raises:
        HookError: a hook has a method that no runner would call.
    """
    several = isinstance(hooks, Iterable) and not isinstance(hooks, type | str | Mapping | Hook)
    specs: tuple[object, ...] = tuple(hooks) if several else () if hooks is None else (hooks,)
    built = tuple(build_component(spec, object, "hooks") for spec in specs)
    HookDispatcher(built)
    return cast("tuple[Hook, ...]", built)


def parse_group_reward(spec: object) -> GroupReward | None:
    """Return the function of a group reward.

    Raises:
        ConfigError: it is not callable.
    """
    if spec is None:
        return None
    function = import_dotted_name(spec, "group_reward") if isinstance(spec, str) else spec
    if isinstance(function, type | Mapping):
        function = build_component(function, object, "group_reward")
    if not callable(function):
        raise ConfigError(
            f"group_reward is {function!r:.80}; give a function that takes the rollouts of a group and "
            "returns a reward for each, such as rl.rewards.ruler(llm)"
        )
    return cast("GroupReward", function)


def parse_store(store: object) -> StoreConfig | StoreClient:
    """Return the settings of the run's own store, or the client of a store that other processes can reach.

    Raises:
        ConfigError: `store` is neither.
    """
    if store is None or isinstance(store, StoreConfig) or (isinstance(store, dict) and "type" not in store):
        return StoreConfig.parse(store)
    if not isinstance(store, StoreClient):
        raise ConfigError(
            f"store is {store!r:.80}; give a dict of settings ({', '.join(StoreConfig.model_fields)}), a "
            "StoreConfig, or the StoreClient of an existing store"
        )
    if store.is_in_process:
        raise ConfigError(
            "store is an object of this process, which runners cannot reach; give the client of a StoreActor"
        )
    return store


def parse_algorithm(spec: object, num_epochs: int | None) -> TrainerAlgorithm | None:
    """Return the algorithm, with another number of epochs if `num_epochs` is given.

    Raises:
        ConfigError: `spec` does not specify an algorithm, or the algorithm would not read `num_epochs`.
    """
    algorithm: Any = None if spec is None else build_component(spec, BaseAlgorithm, "algorithm")
    if num_epochs is not None:
        algorithm = _with_epochs(algorithm, num_epochs)
    return None if algorithm is None else algorithm.with_loop()


def _with_epochs(algorithm: Any, num_epochs: int) -> BaseAlgorithm:
    if algorithm is None:
        raise ConfigError("nothing reads num_epochs: the Trainer has no algorithm; leave it out, or give one")
    if not hasattr(algorithm, "n_epochs"):
        raise ConfigError(
            f"nothing reads num_epochs: {type(algorithm).__name__} has no n_epochs; leave it out"
        )
    if isinstance(algorithm, PolicyAlgorithm | SupervisedAlgorithm):
        if algorithm.n_steps is not None:
            raise ConfigError(
                "num_epochs and the algorithm's n_steps both set the length of training; give one of them"
            )
        return algorithm.with_epochs(num_epochs)
    algorithm.n_epochs = num_epochs
    return algorithm


def chosen_algorithm(algorithm: TrainerAlgorithm | None, dev: bool) -> TrainerAlgorithm:
    """Return the algorithm of a run.

    Args:
        dev: True for a run in which the agent is tried with a fast algorithm, `Baseline` if there is none.

    Raises:
        ConfigError: the algorithm is missing.
        TypeError: the algorithm is not fast.
    """
    if dev and algorithm is None:
        return Baseline()
    if dev and not isinstance(algorithm, FastAlgorithm):
        raise TypeError(
            f"dev() requires a FastAlgorithm, and the Trainer's is {type(algorithm).__name__}; use Baseline()"
        )
    if algorithm is None:
        raise ConfigError(
            "the Trainer has no algorithm; give it one, such as GRPO(model=...), or call dev() to try "
            "the agent"
        )
    return algorithm


def given_names(**arguments: object) -> list[str]:
    """Return the names of the arguments that are not None, in alphabetical order."""
    return sorted(name for name, value in arguments.items() if value is not None)


def check_no_proxy(algorithm: PolicyAlgorithm, llm_proxy: object) -> None:
    """Raise a ConfigError if a proxy was given, which an algorithm that trains a policy does not read."""
    if llm_proxy is not None:
        raise ConfigError(
            f"nothing reads llm_proxy: raylight's own engine serves the model of {type(algorithm).__name__}; "
            "leave it out"
        )


def check_unread(algorithm: SupervisedAlgorithm, inputs: Iterable[object], arguments: Iterable[str]) -> None:
    """Raise a ConfigError if something was given that a run without rollouts does not read.

    Args:
        inputs: agents and tasks, None if not given.
        arguments: names of the given arguments that only an algorithm with rollouts reads.
    """
    given = ["agent or dataset"] if any(value is not None for value in inputs) else []
    if unread := [*given, *arguments]:
        raise ConfigError(
            f"nothing reads {', '.join(unread)}: {type(algorithm).__name__} learns from the examples of its "
            "`data` and `val_data`, without rollouts; leave these arguments out"
        )
