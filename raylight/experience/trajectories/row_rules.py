"""Rules that choose the calls and the rows of a rollout that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raylight.config import MODEL_NAME
from raylight.experience.trajectories.off_policy import untrainable_parameters
from raylight.experience.trajectories.trajectory import (
    Trajectories,
    TrajectorySelection,
    build_trajectories,
    select_rows,
)
from raylight.traces.trained_agents import filter_generations, split_auxiliary
from raylight.types import FinishedRollout, Generation, Trajectory


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def algorithm_settings(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of the algorithm in the content of a run's `config.yaml`; empty where it has none.

    VERL's description is verl's configuration; the settings that it resolves to are among the run's facts.
    """
    return _section(_section(config, "run"), "algorithm") or _section(config, "algorithm")


@dataclass(frozen=True)
class RowRules:
    """Rules that choose the calls and the rows of a rollout that are trained.

    Args:
        trained_agents: regular expression for the agents whose calls are trained, in addition to those that a
            rollout marked. None trains all calls of a rollout that marked no agent.
        train_auxiliary_calls: also train on calls that asked for another model name.
        trajectory_selection: rows of a rollout that are trained.
        replays_sampling: calls with truncation or penalties are trained where an engine recorded the tokens
            that could have been sampled. False with a teacher, which scores tokens without either.
        models: names of the trained models in a run with several; empty: all calls belong to the trained one.
    """

    trained_agents: str | None = None
    train_auxiliary_calls: bool = False
    trajectory_selection: TrajectorySelection = "all"
    replays_sampling: bool = True
    models: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> RowRules:
        """Return the rules in the content of a run's `config.yaml`; the defaults where it has none."""
        algorithm, agents = algorithm_settings(config), _section(config, "run").get("trained_agents")
        return RowRules(
            agents if isinstance(agents, str) else None,
            algorithm.get("train_auxiliary_calls") is True,
            "longest" if algorithm.get("trajectory_selection") == "longest" else "all",
            algorithm.get("teacher") is None,
            (MODEL_NAME,) if algorithm.get("opponents") else _trained_models(algorithm.get("models")),
        )

    def split_calls(self, finished: FinishedRollout) -> tuple[list[Generation], list[Generation]]:
        """Return the calls of a rollout that are trained, unless they were cut off, and the auxiliary calls
        of the same agents that are not."""
        calls = filter_generations(finished, self.trained_agents)
        if self.models:
            calls = [call for call in calls if call.model in self.models]
        return (calls, []) if self.train_auxiliary_calls else split_auxiliary(calls)


def _trained_models(models: object) -> tuple[str, ...]:
    """Return the names of the trained models in the `models` of a run's `config.yaml`."""
    if not isinstance(models, Mapping):
        return ()
    return tuple(
        name
        for name, config in models.items()
        if not (isinstance(config, Mapping) and config.get("trained") is False)
    )


DEFAULT_RULES = RowRules()
"""The rules of a run that sets none."""


class TrainedRows(NamedTuple):
    """Rows of a rollout, and the indices of those that are trained."""

    trajectories: Trajectories
    trained: range


def trained_rows(finished: FinishedRollout, rules: RowRules) -> TrainedRows:
    """Return the rows of a rollout, as a batch would have them."""
    calls, _ = rules.split_calls(finished)
    off_policy = {call.key.call_id for call in calls if untrainable_parameters(call, rules.replays_sampling)}
    trajectories = build_trajectories(calls, off_policy)
    trained = select_rows(trajectories.rows, rules.trajectory_selection)
    return TrainedRows(trajectories, range(0) if is_masked(finished) else trained)


def learned_rows(finished: FinishedRollout, rules: RowRules) -> list[Trajectory]:
    """Return the rows of a rollout to learn from as demonstrations.

    In contrast to a batch's, they include calls that were not sampled from the policy's own distribution.
    """
    return [row for _, row in learned_branches(finished, rules)]


def learned_branches(finished: FinishedRollout, rules: RowRules) -> list[tuple[list[Generation], Trajectory]]:
    """Return the rows of `learned_rows`, each after its calls."""
    if is_masked(finished):
        return []
    calls, _ = rules.split_calls(finished)
    built = build_trajectories(calls)
    branches: list[list[Generation]] = [[] for _ in built.rows]
    for call, position in zip(built.calls, built.positions, strict=True):
        branches[position.row].append(call)
    chosen = select_rows(built.rows, rules.trajectory_selection)
    return [(branches[i], built.rows[i]) for i in chosen if built.rows[i].trained_tokens]


def is_masked(finished: FinishedRollout) -> bool:
    """Return True for a truncated rollout whose reward counts and whose tokens are not trained."""
    attempt = finished.rollout.attempt
    return (
        finished.rollout.config.truncated == "mask" and attempt is not None and attempt.truncated is not None
    )
