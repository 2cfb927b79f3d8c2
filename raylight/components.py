"""Components by description: an instance, a class, a factory, a dotted name, or a dict with a `type`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from raylight.errors import ConfigError

T = TypeVar("T")


def build_component(
    spec: Any,
    expected: type[T],
    name: str,
    default: Callable[..., T] | None = None,
    dict_default: Callable[..., T] | None = None,
    **defaults: Any,
) -> T:
    """The component that `spec` describes.

    Args:
        spec: an instance of `expected`; a class or another callable that makes one; the dotted name of any of these
            (`"package.module:Class"` or `"package.module.Class"`); a dict with such a thing as `"type"` and the arguments for it;
            or None.
        expected: what it must be; `object` for anything: then functions, classes, strings and dicts describe it, and whatever else
            there is has been made already.
        name: of the argument, for messages.
        default: what makes the component when `spec` is None.
        dict_default: what makes it when `spec` is a dict without a `"type"`.
        defaults: arguments for whatever is called, where it has a parameter of that name and `spec` gives none.

    Raises:
        ConfigError: it cannot be found, does not take the arguments, lacks one, or is something else. What the component itself
            raises while it is made is left as it is.
    """
    given: dict[str, Any] = {}
    source = spec
    if source is None:
        if default is None:
            raise ConfigError(
                f"{name} is missing; give {_article(expected.__name__)}, its class or its dotted name"
            )
        source = default
    elif isinstance(source, Mapping) and not _is_made(source, expected):
        given = dict(source)
        source = given.pop("type", None)
        source = dict_default if source is None else source
        if source is None:
            raise ConfigError(
                f"{name} as a dict needs a 'type', the class or its dotted name; it has: {_listed(given)}"
            )
    if isinstance(source, str) and not _is_made(source, expected):
        source = find_component(source, name)
    if _is_made(source, expected):
        if given:
            raise ConfigError(f"{name}: {source!r:.80} is made already and takes no {_listed(given)}")
        return source
    made = _make(source, expected, name, given, defaults)
    if not isinstance(made, expected):
        raise ConfigError(
            f"{name} must be {_article(expected.__name__)}, but {_title(source)} made {made!r:.80}"
        )
    return made


def _is_made(thing: Any, expected: type) -> bool:
    """Whether it is the component itself, and no description of it."""
    if expected is object:
        return not (isinstance(thing, str | Mapping | type) or inspect.isroutine(thing))
    return isinstance(thing, expected)


def find_component(dotted: str, name: str) -> Any:
    """What a dotted name names.

    Raises:
        ConfigError: it is none, or there is no such thing.
    """
    module_name, _, path = dotted.partition(":") if ":" in dotted else dotted.rpartition(".")
    if not module_name or not path:
        raise ConfigError(f"{name}={dotted!r} is no dotted name; write 'package.module:Class'")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name}={dotted!r}: cannot import {module_name}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{name}={dotted!r}: {_title(found)} has no {part!r}{_nearest(part, dir(found))}"
            )
        found = getattr(found, part)
    return found


def _make(source: Any, expected: type, name: str, given: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """Call a class or a factory with the arguments that it takes."""
    if not callable(source) or (isinstance(source, type) and not issubclass(source, expected)):
        raise ConfigError(
            f"{name} must be {_article(expected.__name__)}, its class, a dotted name or a dict with a 'type', not {source!r:.80}"
        )
    try:
        parameters = inspect.signature(source).parameters
    except (TypeError, ValueError):  # of a callable written in C, which checks its arguments itself
        return source(**given)
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    arguments = {n: value for n, value in defaults.items() if n in named} | given
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for unknown in given.keys() - named.keys():
            raise ConfigError(f"{name}: {_title(source)} takes no {unknown!r}{_nearest(unknown, named)}")
    if missing := [n for n, p in named.items() if p.default is p.empty and n not in arguments]:
        raise ConfigError(
            f"{name}: {_title(source)} needs {_listed(missing)}; give {{'type': ..., {missing[0]!r}: ...}}"
        )
    return source(**arguments)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = [name for name in known if not name.startswith("_")]
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5) or sorted(names)[:12]
    return f"; it has: {', '.join(near)}" if near else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _title(thing: Any) -> str:
    return getattr(thing, "__name__", None) or repr(thing)[:80]


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"
