"""The steps of a Dockerfile that a sandbox without images can take: folders, files and variables.

A sandbox of the machine's own programs cannot start from an image. It has what the machine has, and the
files that the Dockerfile copies.
"""

from __future__ import annotations

import copy
import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from raylight.errors import DatasetError

IGNORED = {"LABEL", "EXPOSE", "SHELL", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "USER", "VOLUME"}
"""Instructions without an effect on files or variables."""
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])((?:[^{}]|\$\{[^{}]*\})*))?\})")
"""`$NAME`, `${NAME}`, `${NAME:-word}` or `${NAME:+word}`; a word may have references too, without words."""
SANDBOX_PATH = "${PATH}"
"""Stands in values for the PATH of the sandbox, as PATH has a value in all images."""


@dataclass
class BuildSteps:
    """Outcome of a Dockerfile without its image."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    """Variables that only the steps have, of ARG. Of a name in both, `env` holds."""
    copies: list[tuple[Path, str]] = field(default_factory=list)
    """Files of the folder, each with its absolute path in the sandbox."""
    commands: list[tuple[str, str]] = field(default_factory=list)
    """Working directory and shell command of each RUN, in order."""

    def expand(self, text: str) -> str:
        """Return a text with the values of variables; one that is not set is empty."""

        def value_of(match: re.Match[str]) -> str:
            name, operator, word = match[1] or match[2], match[3], match[4]
            value = self.env.get(name, self.args.get(name, SANDBOX_PATH if name == "PATH" else ""))
            return value if operator is None or bool(value) == (operator == "-") else self.expand(word)

        return REFERENCE.sub(value_of, text)


def read_build_steps(dockerfile: Path) -> BuildSteps:
    """Read the steps of a Dockerfile.

    Raises:
        DatasetError: it copies a file that is not there, or has an instruction that needs an image.
    """
    steps = BuildSteps()
    stages: dict[str, BuildSteps] = {}
    folder = dockerfile.parent
    for number, line in _instructions(dockerfile.read_text(encoding="utf-8")):
        name, _, rest = line.partition(" ")
        try:
            if name.upper() == "FROM":  # the last stage is the environment, with what it is based on
                base, *named = [word.lower() for word in rest.split() if not word.startswith("--")]
                steps = copy.deepcopy(stages.get(base, BuildSteps()))
                stages[named[-1] if named else ""] = steps
            else:
                _take(steps, name.upper(), rest.strip(), folder)
        except (DatasetError, ValueError) as error:  # of shlex: an open quotation mark
            raise DatasetError(f"{dockerfile}, line {number}: {error}") from None
    return steps


def _take(steps: BuildSteps, name: str, rest: str, folder: Path) -> None:
    """Add one instruction."""
    if name == "WORKDIR":
        steps.workdir = posixpath.join(steps.workdir, steps.expand(rest.strip("\"'")))
    elif name == "ENV":  # all values of an instruction refer to the variables before it
        steps.env |= {key: steps.expand(value) for key, value in _pairs(rest)}
    elif name == "ARG":
        words = (word.partition("=") for word in shlex.split(rest))
        steps.args |= {key: steps.expand(value) for key, equals, value in words if equals}
    elif name == "RUN":
        command = shlex.join(json.loads(rest)) if rest.startswith("[") else rest
        steps.commands.append((steps.workdir, command))
    elif name in ("COPY", "ADD"):
        steps.copies += _copies(rest, steps, folder)
    elif name not in IGNORED:
        raise DatasetError(f"{name} needs an image; use a sandbox with images, such as podman")


def _copies(rest: str, steps: BuildSteps, folder: Path) -> list[tuple[Path, str]]:
    """Return the files that COPY or ADD takes from the folder."""
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if any(word.startswith("--from") for word in words):
        raise DatasetError("COPY --from needs an image; use a sandbox with images, such as podman")
    *sources, target = [steps.expand(word) for word in words if not word.startswith("--")]
    into_folder = target.endswith("/") or target == "." or len(sources) > 1
    destination = posixpath.normpath(posixpath.join(steps.workdir, target))
    found = []
    for source in sources:
        if "://" in source:
            raise DatasetError(f"{source} would be downloaded; use a sandbox with images, such as podman")
        matches = sorted(folder.glob(source.lstrip("/") or ".")) if source.strip("./") else [folder]
        if not matches:
            raise DatasetError(f"{source} is not in {folder}")
        for match in matches:
            if match.is_dir():
                found += [
                    (path, posixpath.join(destination, path.relative_to(match).as_posix()))
                    for path in sorted(match.rglob("*"))
                    if path.is_file()
                ]
            else:
                many = into_folder or len(matches) > 1
                found.append((match, posixpath.join(destination, match.name) if many else destination))
    for path, _ in found:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DatasetError(f"{path} leads out of {folder}; replace the link by the file")
    return found


def _pairs(rest: str) -> list[tuple[str, str]]:
    """Return the variables of `ENV a=1 b=2` or `ENV a 1`."""
    words = shlex.split(rest)
    if words and "=" in words[0]:
        return [(key, value) for key, equals, value in (word.partition("=") for word in words) if equals]
    return [(words[0], " ".join(words[1:]))] if len(words) > 1 else []


def _instructions(text: str) -> list[tuple[int, str]]:
    """Return each instruction with the number of its first line, its continued lines joined."""
    found: list[tuple[int, str]] = []
    open_line = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        part = stripped.removesuffix("\\").rstrip()
        if open_line:
            found[-1] = (found[-1][0], f"{found[-1][1]} {part}")
        else:
            found.append((number, part))
        open_line = stripped.endswith("\\")
    return found
