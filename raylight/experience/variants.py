"""Variants of a setting: a choice by name, such as a policy loss, that brings the settings that it reads.

A variant is verl's, or a function that a user registers by a decorator.


The settings of a variant may also be given flat, by verl's keys, next to the setting itself:
`GRPO(loss_mode="clip_cov", clip_cov_ratio=1e-3)` is `GRPO(loss=ClipCovLoss(clip_cov_ratio=1e-3))`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from raylight.base_config import Config
from raylight.errors import ConfigError

Function = Callable[..., Any]


class Variant(Config):
    """Base of the variants of one setting."""

    name: str
    """Choice that the variant stands for, by verl's name."""


@dataclass(frozen=True)
class VariantTable:
    """Variants of one setting, its flat keys, and the functions that users registered.

    Args:
        kind: noun for messages, such as "policy loss".
        field: setting that holds a variant.
        selector: flat key that chooses the variant by name.
        decorator: name of the decorator that registers a function.
        arguments: parameters that a registered function may have.
        variants: variants of verl's names.
        user: variant of the registered functions.
        unsupported: verl's names that cannot be chosen, each with the reason.
    """

    kind: str
    field: str
    selector: str
    decorator: str
    arguments: tuple[str, ...]
    variants: tuple[type[Variant], ...]
    user: type[Variant]
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    """Functions that users registered, by name."""

    @property
    def names(self) -> list[str]:
        """Names of verl that can be chosen."""
        return sorted(name for variant in self.variants for name in names_of(variant))

    def register(self, name: str, function: Function) -> None:
        """Add a user's function.

        Raises:
            ConfigError: the name is taken, or the function has a parameter that is not in `arguments`.
        """
        if name in (*self.names, *self.unsupported):
            raise ConfigError(f"the name {name!r} is already a {self.kind} of verl; choose another name")
        known = self.functions.get(name, function)
        # the same function may be registered again, as in a notebook cell that is run twice
        if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ConfigError(
                f"the {self.kind} {name!r} is already {known.__module__}.{known.__qualname__}; choose "
                "another name"
            )
        unknown = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.name not in self.arguments and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if unknown:
            raise ConfigError(
                f"the {self.kind} {name!r} has unknown parameters: {', '.join(unknown)}; it may have: "
                f"{', '.join(self.arguments)}"
            )
        self.functions[name] = function

    def resolve(self, name: str) -> Function | None:
        """Return the user's function of a name, or None for one of verl's.

        Raises:
            ConfigError: the name is unknown, or cannot be chosen.
        """
        if name in self.functions:
            return self.functions[name]
        if name in self.unsupported:
            raise ConfigError(f"verl's {self.selector} {name!r} cannot be used: {self.unsupported[name]}")
        if name not in self.names:
            known = sorted([*self.names, *self.functions])
            nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
            raise ConfigError(
                f"unknown {self.selector} {name!r}; choose from: {', '.join(nearest)}, or register your own "
                f"with @raylight.{self.decorator}(...)"
            )
        return None

    def variant(self, name: str) -> type[Variant]:
        """Return the class of a name.

        Raises:
            ConfigError: the name is unknown.
        """
        if self.resolve(name) is not None:
            return self.user
        return next(variant for variant in self.variants if name in names_of(variant))

    def parse(self, value: Any) -> Any:
        """Return the variant that a name or a mapping with a name describes; anything else as it is."""
        settings = {"name": value} if isinstance(value, str) else value
        if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
            return value
        return self.variant(settings["name"])(**settings)

    def nest(self, model: type[BaseModel], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Move flat keys of a model's arguments into the variant that they belong to.

        A model may also declare flat keys as fields, whose defaults hold where the arguments have none.

        Returns:
            The arguments, and a phrase for each changed key that the chosen variant does not read.
        """
        readers, declared = self._readers(), model.model_fields
        keys = {*readers, self.selector}
        defaults = {key: declared[key].get_default(call_default_factory=True) for key in keys & {*declared}}
        flat = defaults | {key: values[key] for key in keys & {*values} if values[key] is not None}
        rest = {key: value for key, value in values.items() if key not in keys or key in declared}
        if not flat:
            return rest, []
        chosen = self._chosen(model, rest.get(self.field), flat.pop(self.selector, None))
        reads = self.variant(chosen["name"]).model_fields
        unread = [
            f"{key} (read with {self.selector} {', '.join(names)}; it is {chosen['name']})"
            for key, names in readers.items()
            if key in flat and key not in reads and flat[key] != self._default(key)
        ]
        own = {key: value for key, value in flat.items() if key in reads}
        return rest | {self.field: chosen | own}, unread

    def _chosen(self, model: type[BaseModel], given: Any, name: str | None) -> dict[str, Any]:
        """Return the settings of the chosen variant before flat keys are added."""
        if given is None:
            field = model.model_fields[self.field]
            given = field.get_default(call_default_factory=True) if not field.is_required() else None
            if given is None:
                given = {"name": names_of(field.annotation)[0]}  # type: ignore[arg-type]
        if isinstance(given, str):
            given = {"name": given}
        settings = given.model_dump() if isinstance(given, BaseModel) else dict(given)
        if name is None:
            return settings
        same = self.variant(name) is self.variant(settings["name"])
        return settings | {"name": name} if same else {"name": name}

    def _readers(self) -> dict[str, list[str]]:
        """Return the names whose variants read a flat key, by key."""
        readers: dict[str, list[str]] = {}
        for variant in self.variants:
            for key in variant.model_fields.keys() - {"name"}:
                readers.setdefault(key, []).extend(names_of(variant))
        return readers

    def _default(self, key: str) -> Any:
        return next(
            field.default for variant in self.variants if (field := variant.model_fields.get(key)) is not None
        )


def names_of(variant: type[BaseModel]) -> tuple[str, ...]:
    """Return the names that a variant stands for."""
    return get_args(variant.model_fields["name"].annotation)
