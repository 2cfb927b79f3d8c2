"""Classes of environments as TRL's `environment_factory` takes them: their tools, and checks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from raylight.errors import AgentSignatureError, ConfigError

Factory = Callable[[], Any]
"""A class, or another callable without arguments that returns an environment."""
NOT_TOOLS = ("reset", "get_reward", "reward", "close")
"""Public methods that are not tools."""


def instance_type(factory: Factory) -> type:
    """Return the class of a factory's environments. A factory that is no class is called once.

    Raises:
        AgentSignatureError: it cannot be called without arguments, or its environments have no `reset`.
    """
    if not callable(factory):
        raise AgentSignatureError(
            "rl.environments.environment takes a class or a function that returns an environment, not "
            f"{factory!r:.80}"
        )
    name = getattr(factory, "__name__", repr(factory))
    try:
        with contextlib.suppress(ValueError):  # written in C, without a signature
            inspect.signature(factory).bind()
    except TypeError as error:
        raise AgentSignatureError(
            f"rl.environments.environment calls {name} without arguments, one call for each rollout: "
            f"{error}; give "
            "defaults, or a function that passes the arguments"
        ) from None
    if inspect.isclass(factory):
        found: type = factory
    else:
        instance = factory()
        found = type(instance)
        if callable(close := getattr(instance, "close", None)) and not inspect.iscoroutinefunction(close):
            close()
    if not callable(getattr(found, "reset", None)):
        raise AgentSignatureError(
            f"the environment {found.__name__} has no method reset; define `def reset(self, **row)`, which "
            "receives the columns of the task and returns the first observation or None"
        )
    return found


def tool_methods(cls: type) -> list[str]:
    """Return the names of a class's tools: its public methods, in alphabetical order."""
    return [
        name
        for name, _ in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


def tool_schemas(cls: type) -> list[dict[str, Any]]:
    """Return the tools of a class in OpenAI's form, from their type hints and docstrings.

    Raises:
        AgentSignatureError: a tool has no docstring, or an argument has no type hint or no description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas = []
    for name in tool_methods(cls):
        try:
            schema = get_json_schema(getattr(cls, name))
        except (DocstringParsingException, TypeHintParsingException, NameError, ValueError) as error:
            raise AgentSignatureError(
                f"the tool {cls.__name__}.{name} cannot be described to the model: {error}. Give the method "
                "type hints and a docstring with a line for each argument below `Args:`, or begin its name "
                "with an underscore if it is no tool"
            ) from error
        schema["function"].pop("return", None)  # OpenAI's form does not have it
        schemas.append(schema)
    return schemas


def check_positive(name: str, value: Any, kind: type = int) -> None:
    """Check that a setting of an environment is a number above 0.

    Args:
        kind: `int`, or `float`, which also accepts whole numbers.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else int) or value <= 0:
        raise ConfigError(f"{name}={value!r:.40} is not {'a whole' if kind is int else 'a'} number above 0")
