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
from typing import get_args

from pydantic import BaseModel

from raylight.base_config import Config
from raylight.errors import ConfigError
from raylight.types import JsonObject

Function = Callable[..., object]


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

    def parse(self, value: object) -> object:
        """Return the variant that a mapping of `nest` describes; anything else as it is."""
        return self.variant(value["name"])(**value) if isinstance(value, Mapping) else value

    def nest(self, model: type[BaseModel], values: Mapping[str, object]) -> tuple[JsonObject, list[str]]:
        """Move flat keys of a model's arguments into the variant that they belong to.

        A model may also declare flat keys as fields, whose defaults hold where the arguments have none. What
        the model's own default variant sets holds for another variant that reads it, too.

        Returns:
            The arguments, and a phrase for each changed key that the chosen variant does not read.

        Raises:
            ConfigError: an argument has a wrong type, or two of them contradict each other.
        """
        readers, declared = self._readers(), model.model_fields
        own = self._own_variant(model)
        given = {
            key: value for key, value in values.items() if key in readers and not self._is_unset(key, value)
        }
        defaults = {
            key: declared[key].get_default(call_default_factory=True)
            for key in {*readers, self.selector} & {*declared}
        }
        rest = {
            key: value
            for key, value in values.items()
            if (key not in readers and key != self.selector) or key in declared
        }
        variant = rest.get(self.field)
        is_plain = (
            variant is None and not defaults and declared[self.field].get_default(call_default_factory=True)
        )
        if self.selector not in values and not given and (is_plain or isinstance(variant, Variant)):
            return rest, []
        nested = self._settings_of(variant)
        name = self._chosen_name(values, nested, defaults, own)
        for key in given.keys() & nested.keys():
            if given[key] != nested[key]:
                raise ConfigError(
                    f"{key} is {given[key]!r}, and {nested[key]!r} in {self.field}; give one of them"
                )
        reads = self.variant(name).model_fields
        unread = [
            f"{key} (read with {self.selector} {', '.join(readers[key])}; it is {name})"
            for key, value in given.items()
            if key not in reads and value not in (self.default_of(key), own.get(key), defaults.get(key))
        ]
        if not isinstance(variant, Variant):
            kept = own | defaults
            nested = {key: value for key, value in kept.items() if key in reads} | nested
        flat = {key: value for key, value in given.items() if key in reads}
        return rest | {self.field: nested | flat | {"name": name}}, unread

    @property
    def flat_keys(self) -> set[str]:
        """The flat keys, with the key that chooses by name."""
        return {*self._readers(), self.selector}

    def _own_variant(self, model: type[BaseModel]) -> JsonObject:
        """Return the name of a model's default variant, and what it sets."""
        field = model.model_fields[self.field]
        default = field.get_default(call_default_factory=True)
        if default is None:
            return {"name": names_of(field.annotation)[0]}  # type: ignore[arg-type]
        return {"name": default.name, **default.model_dump(exclude_unset=True)}

    def _settings_of(self, given: object) -> JsonObject:
        if given is None:
            return {}
        if isinstance(given, str):
            return {"name": given}
        if isinstance(given, Variant):
            return {"name": given.name, **given.model_dump(exclude_unset=True)}
        if not isinstance(given, Mapping) or not isinstance(given.get("name", ""), str):
            raise ConfigError(
                f"{self.field} must be a {self.kind}, its name, or a mapping, not {given!r:.80}"
            )
        return dict(given)

    def _chosen_name(
        self,
        values: Mapping[str, object],
        nested: Mapping[str, object],
        defaults: Mapping[str, object],
        own: Mapping[str, object],
    ) -> str:
        name = values.get(self.selector, nested.get("name", defaults.get(self.selector, own["name"])))
        if not isinstance(name, str):
            raise ConfigError(f"{self.selector} must be a name, not {name!r:.80}")
        if nested.get("name", name) != name:
            raise ConfigError(
                f"{self.selector} is {name!r}, and {self.field} is {nested['name']!r}; give one of them"
            )
        return name

    def _is_unset(self, key: str, value: object) -> bool:
        return value is None and self.default_of(key) is None

    def _readers(self) -> dict[str, list[str]]:
        """Return the names whose variants read a flat key, by key."""
        readers: dict[str, list[str]] = {}
        for variant in self.variants:
            for key in variant.model_fields.keys() - {"name"}:
                readers.setdefault(key, []).extend(names_of(variant))
        return readers

    def default_of(self, key: str) -> object:
        return next(
            field.default for variant in self.variants if (field := variant.model_fields.get(key)) is not None
        )


def names_of(variant: type[BaseModel]) -> tuple[str, ...]:
    """Return the names that a variant stands for."""
    return get_args(variant.model_fields["name"].annotation)
