"""Components from descriptions: an instance, a class, a factory, a dotted name, or a dict with a `type`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from raylight.errors import ConfigError
from raylight.types import JsonObject

T = TypeVar("T")

CODE_FOLDERS: list[str] = []
"""Folders of the components that were named by a file. Ray tells its workers only the script's folder and the
current one, so a runner receives these with its agent."""
_ALLOWED: ContextVar[Collection[str] | None] = ContextVar("allowed dotted names", default=None)
"""Dotted names that may be imported; None: all."""
IN_CODE = "given in code"
"""Stands in a description for a value that was given in code and has no dotted name."""


def build_component(
    spec: Any,
    expected: type[T],
    name: str,
    default: Callable[..., T] | None = None,
    dict_default: Callable[..., T] | None = None,
    **defaults: Any,
) -> T:
    """Build the component that `spec` describes.

    Args:
        spec: an instance of `expected`; a class or another callable that returns one; the dotted name of any
            of these (`"package.module:Class"` or `"package.module.Class"`); a dict with one of these as
            `"type"` and its arguments as the other entries; or None.
        expected: required type of the component. `object` accepts any type: then functions, classes, strings
            and dicts are descriptions, and every other value is the component itself.
        name: name of the argument, for error messages.
        default: factory used when `spec` is None.
        dict_default: factory used when `spec` is a dict without a `"type"`.
        defaults: arguments for the class or factory. Each is passed if it has a parameter of that name and
            `spec` does not give the argument.

    Raises:
        ConfigError: the component cannot be imported, has another type, or its arguments do not fit. Errors
            raised by the component's own code are not converted.
    """
    arguments: JsonObject = {}
    source = spec
    if source is None:
        if default is None:
            raise ConfigError(
                f"{name} is missing; give {_with_article(expected.__name__)}, its class or its dotted name"
            )
        source = default
    elif isinstance(source, Mapping) and not _is_component(source, expected):
        arguments = dict(source)
        source = arguments.pop("type", None)
        source = dict_default if source is None else source
        if source is None:
            raise ConfigError(
                f"{name} as a dict needs a 'type', the class or its dotted name; it has: {_quoted(arguments)}"
            )
    if isinstance(source, str) and not _is_component(source, expected):
        source = import_dotted_name(source, name)
    if _is_component(source, expected):
        if arguments:
            raise ConfigError(
                f"{name}: {source!r:.80} is an instance and takes no {_quoted(arguments)}; give its class as "
                "'type'"
            )
        return source
    component = _call(source, expected, name, arguments, defaults)
    if not isinstance(component, expected):
        raise ConfigError(
            f"{name} must be {_with_article(expected.__name__)}, but {_name_of(source)} returned "
            f"{component!r:.80}"
        )
    return component


class NotImportedError(ConfigError):
    """A dotted name where nothing is imported."""


@contextlib.contextmanager
def names_only(allowed: Collection[str] = ()) -> Iterator[None]:
    """A context in which no dotted name is imported, for commands that only read a file of a stranger.

    Args:
        allowed: dotted names that are imported nevertheless.
    """
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def import_dotted_name(dotted: str, name: str, *, is_ours: bool = False) -> Any:
    """Import the object with a dotted name, `"package.module:Class"` or `"package.module.Class"`.

    Args:
        dotted: the dotted name, or `"path/to/file.py:Class"`.
        name: name of the argument, for error messages.
        is_ours: the name is one of a registry, and not a user's.

    Raises:
        NotImportedError: within `names_only`.
        ConfigError: the name is malformed, or the module or object does not exist.
    """
    allowed = _ALLOWED.get()
    if not is_ours and allowed is not None and dotted not in allowed:
        raise NotImportedError(
            f"{name}={dotted!r:.200} is a dotted name, which a command that only reads it does not import; "
            "give a name of a registry, or run `raylight train`"
        )
    module_name, _, path = dotted.partition(":") if ":" in dotted else dotted.rpartition(".")
    if not module_name or not path:
        raise ConfigError(f"{name}={dotted!r} is not a dotted name; write 'package.module:Class'")
    file = Path(module_name).expanduser().absolute() if module_name.endswith(".py") else None
    if file is not None:
        module_name = _module_of_file(file, f"{name}={dotted!r}")
    try:
        item: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name}={dotted!r}: cannot import {module_name}: {error}") from error
    if file is not None and not _is_from(item, file):
        raise ConfigError(
            f"{name}={dotted!r}: another module {module_name} is imported already, from "
            f"{getattr(item, '__file__', None) or 'the interpreter'}; rename the file"
        )
    for part in path.split("."):
        if not hasattr(item, part):
            raise ConfigError(
                f"{name}={dotted!r}: {_name_of(item)} has no {part!r}{_nearest_names(part, dir(item))}"
            )
        item = getattr(item, part)
    return item


def _module_of_file(file: Path, described: str) -> str:
    """Return the name of a file's module, and make it importable here and in runners.

    Raises:
        ConfigError: the file does not exist.
    """
    if not file.is_file():
        raise ConfigError(f"{described}: there is no file {file}; give the path of a Python file")
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    add_code_folders([str(folder)])
    return ".".join(parts)


def add_code_folders(folders: Iterable[str]) -> None:
    """Make the modules in some folders importable."""
    for folder in folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if folder not in CODE_FOLDERS:
            CODE_FOLDERS.append(folder)


def _is_from(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and Path(origin).samefile(file)


def dotted_name(target: object) -> str:
    """Return "package.module:name" of a class, a function or another global of a module; `IN_CODE` if it is
    none."""
    module_name = getattr(target, "__module__", None) or type(target).__module__
    module = sys.modules.get(module_name)
    name = next((name for name, value in vars(module).items() if value is target), None) if module else None
    if name is None:
        return IN_CODE
    spec = getattr(module, "__spec__", None) if module_name == "__main__" else None
    return f"{spec.name if spec else module_name}:{name}"


def _is_component(value: object, expected: type) -> bool:
    """Return True if a value is the component itself, and not a description of it."""
    if expected is object:
        return not (isinstance(value, str | Mapping | type) or inspect.isroutine(value))
    return isinstance(value, expected)


def _call(
    source: object, expected: type, name: str, arguments: dict[str, object], defaults: dict[str, object]
) -> Any:
    """Call a class or a factory with its arguments, after checking that they fit its signature."""
    if not callable(source) or (isinstance(source, type) and not issubclass(source, expected)):
        raise ConfigError(
            f"{name} must be {_with_article(expected.__name__)}, its class, a dotted name or a dict with a "
            f"'type', not {source!r:.80}"
        )
    try:
        parameters = inspect.signature(source).parameters
    except (TypeError, ValueError):  # a callable written in C without a signature checks its arguments itself
        return source(**arguments)
    keywords = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = {*keywords, *getattr(source, "flat_keys", tuple)()}
    merged = {n: value for n, value in defaults.items() if n in keywords} | arguments
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for unknown in arguments.keys() - accepted:
            raise ConfigError(
                f"{name}: {_name_of(source)} takes no {unknown!r}{_nearest_names(unknown, accepted)}"
            )
    if missing := [n for n, p in keywords.items() if p.default is p.empty and n not in merged]:
        raise ConfigError(
            f"{name}: {_name_of(source)} needs {_quoted(missing)}; give {{'type': ..., {missing[0]!r}: ...}}"
        )
    return source(**merged)


def _nearest_names(word: str, known: Iterable[str]) -> str:
    names = [name for name in known if not name.startswith("_")]
    nearest = difflib.get_close_matches(word, names, n=3, cutoff=0.5) or sorted(names)[:12]
    return f"; it has: {', '.join(nearest)}" if nearest else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _name_of(item: object) -> str:
    return getattr(item, "__name__", None) or repr(item)[:80]


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"
