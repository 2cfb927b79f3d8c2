"""Assignments `NAME=VALUE` of the command line, applied to nested settings."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import yaml

from raylight.errors import ConfigError
from raylight.types import JsonObject


def apply_assignment(settings: JsonObject, text: str, sections: Sequence[str]) -> None:
    """Apply one `--set NAME=VALUE` to nested settings, in place.

    Args:
        text: `NAME` is a dotted name, `VALUE` is read as YAML: `0.9`, `1e-5`, `true`, `{a: 1}` or a word.
        sections: allowed first parts of the name.

    Raises:
        ConfigError: the text has no name or no `=`, its section is unknown, or a part of the name has no
            settings.
    """
    name, equals, value = text.partition("=")
    path = [part.strip().lstrip("-").replace("-", "_") for part in name.split(".")]
    if not equals or not all(path):
        raise ConfigError(
            f"--set {text}: not of the form NAME=VALUE; write for example --set {sections[0]}.n=2"
        )
    if path[0] not in sections:
        nearest = difflib.get_close_matches(path[0], sections, n=3, cutoff=0.5) or sections
        raise ConfigError(
            f"--set {text}: there is no section {path[0]!r}; the nearest are: {', '.join(nearest)}"
        )
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"--set {text}: the value is not YAML: {message}; quote it") from None
    if key := _key_without_space(parsed):
        raise ConfigError(
            f"--set {text}: YAML reads {key!r} as a name without a value; write a space after the colon, and "
            f"quote the whole: --set '{text.replace(key, key.replace(':', ': ', 1))}'"
        )
    set_nested(settings, path, _as_number(parsed) if isinstance(parsed, str) else parsed, f"--set {text}")


def set_nested(settings: JsonObject, path: Sequence[str], value: object, described: str) -> None:
    """Set a value in nested settings, in place.

    Raises:
        ConfigError: a part of the path has no settings.
    """
    target = settings
    for depth, part in enumerate(path[:-1], 1):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError(
                f"{described}: {'.'.join(path[:depth])} is {target!r} and has no settings; leave the last "
                "part of the name out"
            )
    target[path[-1]] = value


def _key_without_space(value: object) -> str | None:
    """Return a key `name:value` of a mapping, which lacks the space after its colon; None without one."""
    if isinstance(value, list):
        return next(filter(None, map(_key_without_space, value)), None)
    if not isinstance(value, dict):
        return None
    glued = (key for key, inner in value.items() if inner is None and isinstance(key, str) and ":" in key)
    return next(glued, None) or _key_without_space(list(value.values()))


def _as_number(text: str) -> object:
    """Return `1e-5` as a number, which YAML 1.1 reads as a string; other texts unchanged."""
    try:
        return float(text) if "e" in text.lower() and text[:1].isdigit() else text
    except ValueError:
        return text
