"""Repairs of small Python modules, for agents that edit files by a shell.

A module has a function that computes with the wrong operator, and the prompt names both operators. One
command of `sed` repairs it. Tests that the agent does not see check the repaired function.
"""

from __future__ import annotations

import json
import operator
import platform
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raylight.errors import ConfigError, DatasetError

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
MODULES = ("shop", "stock", "orders", "prices", "tax", "units", "energy", "tanks", "pumps", "pipes")
FUNCTIONS = ("total", "rest", "share", "rate", "level", "amount", "change", "score", "load", "yield_of")
PARAMETERS = "abcdefghkmnpqrstuvwxyz"
FORMATS = ("bash",)
"""Forms of the conversation that the package has: one block of bash as the answer."""


def repair_tasks(seed: int, count: int) -> list[dict[str, Any]]:
    """Return tasks, each as JSON values.

    A task has a `prompt`; `files`, the module by its path; `tests`, a program by its path, which exits with
    status 0 if the module is repaired; and `command`, which repairs it.
    """
    generator = random.Random(seed)
    return [_task(generator) for _ in range(count)]


def harness(format: str, seed: int, conversation: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield repairs in the form of a harness's conversations.

    Args:
        format: name of the form, one of `FORMATS`.
        conversation: JSON file with the form of another harness: `messages` and `tools` of a conversation,
            with `{prompt}` for the text of the task and `{command}` for the command that repairs it.
            `{system}`, `{release}`, `{version}` and `{machine}` describe this machine.

    Raises:
        ConfigError: the form is unknown.
        DatasetError: the file is malformed, or has no such places.
    """
    if conversation is None and format not in FORMATS:
        raise ConfigError(
            f"the task harness:{format} is unknown; the forms are {', '.join(FORMATS)}; another one is in a "
            "file: --set conversation=FILE.json"
        )
    path = Path(conversation).expanduser() if conversation else Path(__file__).parent / f"{format}.json"
    form = _read_form(path)
    generator = random.Random(seed)
    while True:
        yield _fill(form, _task(generator))


def _read_form(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        form = json.loads(text)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the conversation {path} cannot be read: {error}") from None
    if missing := [name for name in ("{prompt}", "{command}") if name not in text]:
        raise DatasetError(
            f"the conversation {path} has no {' and no '.join(missing)}; put it where it belongs"
        )
    if not isinstance(form, dict) or "messages" not in form:
        raise DatasetError(
            f"the conversation {path} has no messages; write {{'messages': [...], 'tools': [...]}}"
        )
    for name, value in platform.uname()._asdict().items():
        text = text.replace("{" + name + "}", json.dumps(value)[1:-1])
    form = json.loads(text)
    return {"messages": form["messages"], "tools": form.get("tools")}


def _fill(value: Any, task: dict[str, Any]) -> Any:
    """Return a form with the prompt and the command of a task in its texts."""
    if isinstance(value, str):
        return value.replace("{prompt}", task["prompt"]).replace("{command}", task["command"])
    if isinstance(value, list):
        return [_fill(item, task) for item in value]
    return {key: _fill(item, task) for key, item in value.items()} if isinstance(value, dict) else value


def _task(generator: random.Random) -> dict[str, Any]:
    module, function = generator.choice(MODULES), generator.choice(FUNCTIONS)
    first, second = generator.sample(PARAMETERS, 2)
    wrong = generator.choice("+-/%")  # not *, which is special in a pattern of sed
    right = generator.choice([sign for sign in OPERATORS if sign != wrong])
    is_now, must_be = f"{first} {wrong} {second}", f"{first} {right} {second}"
    file, expected = f"{module}.py", OPERATORS[right](7, 2)
    return {
        "prompt": f"{function} in {file} returns {is_now}. It must return {must_be}.",
        "files": {file: f"def {function}({first}, {second}):\n    return {is_now}\n"},
        "tests": {"check.py": f"from {module} import {function}\n\nassert {function}(7, 2) == {expected}\n"},
        "command": f"sed -i 's|{is_now}|{must_be}|' {file}",
    }
