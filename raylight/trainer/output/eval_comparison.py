"""Comparison of evaluations by the files that they wrote: rewards by task, and paired differences."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from raylight.errors import ConfigError
from raylight.trainer.output.scores import Spread, spread
from raylight.types import JsonObject

SETTINGS = ("samples", "sampling", "pass_reward", "failure_reward")
"""Settings of an evaluation on which its scores depend."""


@dataclass(frozen=True)
class SavedEvaluation:
    """An evaluation as its folder has it.

    Attributes:
        rewards: mean reward of each task, by the task as JSON and its number among equal tasks.
    """

    name: str
    agent: str
    model: str
    rewards: dict[tuple[str, int], float]
    config: JsonObject

    @property
    def mean(self) -> Spread:
        """Mean over tasks."""
        return spread([[reward] for reward in self.rewards.values()])

    def differing_settings(self, other: SavedEvaluation) -> list[str]:
        """Return the settings in which another evaluation differs, with both values."""
        pairs = ((name, self.config.get(name), other.config.get(name)) for name in SETTINGS)
        return [f"{name} ({mine} and {theirs})" for name, mine, theirs in pairs if mine != theirs]


def read_evaluation(folder: Path) -> SavedEvaluation:
    """Return the evaluation of an output directory.

    A rollout whose agent failed has the reward that it has in `eval.json`; one that was lost with the
    infrastructure is left out.

    Raises:
        ConfigError: the folder has no evaluation, or a damaged one.
    """
    try:
        figures = json.loads((folder / "eval.json").read_text())
        lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        succeeded = [line["reward"] for line in lines if line["status"] == "succeeded"]
        given = [reward for reward in succeeded if reward is not None]
        chosen = figures["config"]["failure_reward"]
        failed = min([0.0, *given]) if chosen is None else chosen
        rewards: dict[tuple[str, int], list[float]] = {}
        equal: dict[str, dict[int, int]] = {}
        for line in lines:
            task = json.dumps(line["task"], sort_keys=True)
            numbers = equal.setdefault(task, {})
            number = numbers.setdefault(line.get("task_index", 0), len(numbers))
            if line.get("failure") in ("infrastructure", "cancelled"):
                continue
            reward = failed if line["status"] != "succeeded" else line["reward"]
            if reward is not None:
                rewards.setdefault((task, number), []).append(reward)
        if not rewards:
            raise ValueError("no rollout has a reward")
        by_task = {key: statistics.fmean(values) for key, values in rewards.items()}
        return SavedEvaluation(str(folder), figures["agent"], figures["model"], by_task, figures["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} has no evaluation that can be compared ({type(error).__name__}: {error}); give the "
            "output_dir of `raylight eval`, which has eval.json and eval.jsonl"
        ) from None


def compare(first: SavedEvaluation, other: SavedEvaluation) -> Spread | None:
    """Return the difference of the other evaluation to the first, paired by task; None without common tasks.

    Tasks that differ in difficulty widen the interval of a mean, but not of a paired difference
    (https://arxiv.org/abs/2411.00640).
    """
    common = first.rewards.keys() & other.rewards.keys()
    return spread([[other.rewards[task] - first.rewards[task]] for task in common]) if common else None
