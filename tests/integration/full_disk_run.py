"""A run on a small disk that becomes full at a step, and its continuation after the disk has room again.

It is a separate program, in a separate mount namespace: `python full_disk_run.py FOLDER LEFT`, where LEFT is
the number of bytes that stay free.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import training_tasks
from raylight.quickstart.agent import adder

FULL_AT = 2
STEPS = 4


class Filler:
    """Metric logger that fills the disk when a step is logged."""

    def __init__(self, folder: Path) -> None:
        self._file = folder.parent / "filler"

    def start(self, config: dict[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step != FULL_AT:
            return
        disk = os.statvfs(self._file.parent)
        with self._file.open("wb") as file:
            file.write(b"x" * max(disk.f_bavail * disk.f_frsize - int(sys.argv[2]), 0))

    def finish(self) -> None:
        pass


def train(folder: Path, loggers: list[Any], resume: bool) -> dict[str, Any]:
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=STARTER_MODEL, n_steps=STEPS, tasks_per_step=2, group_size=2, lr=1e-4),
        output_dir=folder / "run",
        checkpoint={"every": 1, "keep": 1},
        loggers=["jsonl", *loggers],
        progress=False,
        address="local",  # a cluster outside would not see the disk
    )
    return trainer.fit(adder, training_tasks()[:8], resume="auto" if resume else False)


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        train(folder, [Filler], resume=False)
        result: dict[str, Any] = {"error": "none"}
    except Exception as error:  # the test is about its type
        result = {"error": type(error).__name__, "message": str(error)}
    (folder / "filler").unlink()
    summary = train(folder, [], resume=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    result |= {"steps": summary["steps"], "logged": [row["step"] for row in rows]}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
