"""Design tasks: generation of `tasks.jsonl`, and its loading.

python -m examples.process_agent.design_tasks       solves the references and writes the file
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from examples.process_agent.flowsheets.model import Flowsheet
from examples.process_agent.flowsheets.runs import look_up, rounded
from examples.process_agent.task_definitions import TEST, TRAIN, VALIDATION

Split = Literal["train", "val", "test"]
FILE = Path(__file__).with_name("tasks.jsonl")
DEFINITIONS: dict[Split, list[dict[str, Any]]] = {"train": TRAIN, "val": VALIDATION, "test": TEST}
BUDGETS = {("easy", False): 4, ("medium", False): 5, ("medium", True): 11, ("hard", True): 13}
"""Budget of tool calls, by difficulty and by the need to search for a setting."""
PLACEHOLDER = re.compile(r"<(\S+) (\S+)>")


def make_task(definition: dict[str, Any], split: Split) -> dict[str, Any]:
    """Return a task for the agent and its reward, without the reference.

    Returns:
        `id`, `split`, `difficulty`, `text` (for the agent), `package` and `feeds` (which a design must keep),
        `specs` (path -> the number that a design must have there), `asked` (name -> the number that the
        answer must report), `budget` (number of tool calls without a penalty).
    """
    reference = definition["reference"]
    results = rounded(Flowsheet.read(reference).solve())

    def number(found: re.Match[str]) -> str:
        return format(look_up(results, found[1]), found[2])

    return {
        "id": definition["id"],
        "split": split,
        "difficulty": definition["difficulty"],
        "text": "\n".join(
            [_given(reference), PLACEHOLDER.sub(number, definition["text"]), _wanted(definition["asked"])]
        ),
        "package": reference["package"],
        "feeds": reference["feeds"],
        "specs": {path: look_up(results, path) for path in definition["specs"]},
        "asked": {name: look_up(results, path) for name, path in definition["asked"].items()},
        "budget": BUDGETS[definition["difficulty"], definition.get("search", False)],
    }


def _given(reference: dict[str, Any]) -> str:
    lines = [f"Property package: {reference['package']}. Feeds:"]
    for name, feed in reference["feeds"].items():
        parts = ", ".join(f"{component} {share:g}" for component, share in feed["composition"].items())
        lines.append(
            f"- `{name}`: {feed['flow_kmol_h']:g} kmol/h, {feed['T_K']:g} K, {feed['P_bar']:g} bar; mole "
            f"fractions {parts}"
        )
    return "\n".join(lines)


def _wanted(asked: dict[str, str]) -> str:
    return "Report: " + "; ".join(f"{name} (that is {path})" for name, path in asked.items()) + "."


def make_tasks() -> list[dict[str, Any]]:
    """Return all tasks, from their references."""
    return [
        make_task(definition, split)
        for split, definitions in DEFINITIONS.items()
        for definition in definitions
    ]


def load_tasks(split: Split) -> list[dict[str, Any]]:
    """Return the tasks of a split from `tasks.jsonl`."""
    tasks = [json.loads(line) for line in FILE.read_text().splitlines()]
    return [task for task in tasks if task["split"] == split]


def main() -> None:
    tasks = make_tasks()
    FILE.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    print(f"{len(tasks)} tasks in {FILE.name}")


if __name__ == "__main__":
    main()
