"""The records of a run under fault, and the faults that are found in them.

The records are the agent's own log, the driver's log of batches, the store, the metrics and the summary.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from chaos_log import BATCHES, LOG

from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.types import Attempt, FinishedRollout, StepGroups, TokenTotals

NAME = re.compile(r"(?P<lineage>\w+)-(?P<mode>train|val)-(?P<number>\d+)-")
"""Name of a rollout, made by the Trainer's loop, with the number of its group or of the validated step."""


class Finding(NamedTuple):
    """A fault in the data of a run."""

    kind: Literal["lost", "wrong", "twice"]
    text: str


def count_findings(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of findings of each kind."""
    counts = Counter(finding.kind for finding in findings)
    return {kind: counts[kind] for kind in ("lost", "wrong", "twice")}


@dataclass(frozen=True)
class Plan:
    """Settings of the run.

    Attributes:
        steps: planned number of steps.
        tasks: number of groups that each step trains on.
        samples: number of rollouts in each group.
        may_fail: number of rollouts that the fault itself may fail.
        cancels: a driver was interrupted and cancelled rollouts. An attempt of these may still have
            succeeded, before the next driver queued them again.
        reorders: the clock was set back, and with it the order of the calls of attempts that ran.
    """

    steps: int
    tasks: int
    samples: int
    may_fail: int = 0
    cancels: bool = False
    reorders: bool = False
    max_staleness: int = 0
    stale: str = "wait"


@dataclass
class Evidence:
    """All records of a run.

    Attributes:
        log: lines of the agent's own log.
        batches: lines of the driver's log of batches and of loaded training states.
        rollouts: all rollouts, each with its deciding attempt.
        attempts: all attempts of each rollout, by its id.
        recorded: groups of each step of the run's last lineage, from the store.
        tokens: numbers of tokens of that lineage's training rollouts, as the store counts them.
        rows: `metrics.jsonl`.
        lineage: prefix of the names of the run's rollouts.
    """

    plan: Plan
    log: list[dict[str, Any]]
    batches: list[dict[str, Any]]
    rollouts: list[FinishedRollout]
    attempts: dict[str, list[Attempt]]
    recorded: dict[int, StepGroups]
    tokens: TokenTotals
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None
    lineage: str
    step_of_group: dict[int | None, int] = field(init=False)
    """Step that took a group, trained or dropped."""

    def __post_init__(self) -> None:
        self.step_of_group = {
            group: step for step, taken in self.recorded.items() for group in (*taken.trained, *taken.dropped)
        }

    def current(self) -> Iterator[tuple[FinishedRollout, str, int]]:
        """Yield the rollouts of the run's last lineage, with mode, and with group or validated step."""
        for item in self.rollouts:
            match = NAME.match(item.rollout.rollout_id)
            if match and match["lineage"] == self.lineage:
                yield item, match["mode"], int(match["number"])

    def step_of(self, mode: str, number: int) -> int | None:
        """Return the step that trained on a group; None if none did."""
        if mode == "val":
            return number
        step = self.step_of_group.get(number)
        return step if step and number in self.recorded[step].trained else None


def group_of(name: str) -> int | None:
    """Return the group of a training rollout; None for another one."""
    match = NAME.match(name)
    return int(match["number"]) if match and match["mode"] == "train" else None


def read_evidence(folder: Path, run: Path, plan: Plan) -> Evidence:
    """Read the records of a run.

    Args:
        folder: folder of the test, with the agent's log.
        run: run directory.
    """
    batches, summary = read_lines(folder / BATCHES), run / "summary.json"
    names = [name for line in batches for name in line.get("rewards", ())]
    match = NAME.match(names[-1]) if names else None
    lineage = match["lineage"] if match else ""
    return Evidence(
        plan,
        read_lines(folder / LOG),
        batches,
        *run_blocking(_read_store(run / "store.db", lineage)),
        read_lines(run / "metrics.jsonl"),
        json.loads(summary.read_text()) if summary.exists() else None,
        lineage,
    )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a line that a kill cut off is left out."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


async def _read_store(
    file: Path, lineage: str
) -> tuple[list[FinishedRollout], dict[str, list[Attempt]], dict[int, StepGroups], TokenTotals]:
    service = StoreService(file, read_only=True)
    try:
        store = StoreClient(service)
        ids = [rollout.rollout_id for rollout in await store.query_rollouts()]
        attempts = {rollout_id: list(await store.query_attempts(rollout_id)) for rollout_id in ids}
        return (
            await store.collect(ids, with_spans=True),
            attempts,
            await store.query_steps(lineage),
            await store.token_totals(f"{lineage}-train-"),
        )
    finally:
        await service.close()
