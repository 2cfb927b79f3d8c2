"""Settings by dotted name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import yaml

from raylight.errors import ConfigError


def apply_assignment(settings: dict[str, Any], text: str, sections: Sequence[str]) -> None:
    """Apply one `--set NAME=VALUE` to nested settings, in place.

    Args:
        text: `NAME` is a dotted name, `VALUE` is read as YAML: `0.9`, `true`, `{a: 1}` or a word.
        sections: allowed first parts of the name.

    Raises:
        ConfigError: the text has no name or no `=`, its section is unknown, or a part of the name is not a section.
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
    target = settings
    for depth, part in enumerate(path[:-1], 1):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError(
                f"--set {text}: {'.'.join(path[:depth])} is {target!r} and has no settings; leave the last part of the name out"
            )
    try:
        target[path[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--set {text}: the value is not YAML: {' '.join(str(error).split())}; quote it"
        ) from None
