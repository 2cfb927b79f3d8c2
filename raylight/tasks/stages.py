"""Stages of a curriculum, with gates between them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, is_number
from raylight.errors import ConfigError
from raylight.tasks.datasets import as_task_set
from raylight.tasks.task_set import Draw, NamedSamplers, SetSampler, TaskSet, join_names, named_parts
from raylight.types import JsonObject


class Stages(TaskSet):
    """Sets of tasks, one after the other: the next one begins when the current one is learned.

    The gate opens when the mean reward of the last `window` groups of the current stage reaches `advance_at`.
    The last stage has no end. The number of steps is not known, so that the algorithm needs `n_steps`.
    Metrics are shown for each stage (`source/NAME/reward`).

    Args:
        stages: datasets by name, in order.
        advance_at: mean reward that opens a gate.
        window: number of groups whose mean it is.

    Raises:
        ConfigError: there are no stages, or the window or `advance_at` is wrong.
        DatasetError: a stage cannot be read or is empty.
    """

    def __init__(self, stages: Mapping[str, object], *, advance_at: float, window: int = 32) -> None:
        if not isinstance(stages, Mapping) or not stages or not all(isinstance(n, str) for n in stages):
            raise ConfigError(f"Stages has the stages {stages!r:.80}; give datasets by name, in order")
        if not is_number(advance_at, -MAX_FACTOR, MAX_FACTOR):
            raise ConfigError(f"advance_at={advance_at!r:.80} must be a finite number")
        if not (isinstance(window, int) and is_number(window, 1, MAX_COUNT)):
            raise ConfigError(f"window={window!r:.80} must be an integer, at least 1")
        self._stages = {name: as_task_set(stage, f"stage {name!r}") for name, stage in stages.items()}
        self._advance_at, self._window = advance_at, window

    @property
    def size(self) -> None:
        return None

    def sampler(self, seed: int) -> StageSampler:
        samplers = {name: stage.sampler(seed + i) for i, (name, stage) in enumerate(self._stages.items())}
        return StageSampler(samplers, self._advance_at, self._window)

    def parts(self) -> list[tuple[str | None, object]]:
        return named_parts(self._stages)

    def fingerprint(self) -> JsonObject:
        return {
            "stages": {name: stage.fingerprint() for name, stage in self._stages.items()},
            "advance_at": self._advance_at,
            "window": self._window,
        }


class StageSampler(NamedSamplers):
    """State machine of stages."""

    learns = True

    def __init__(self, samplers: Mapping[str, SetSampler], advance_at: float, window: int) -> None:
        super().__init__(samplers)
        self._names = list(samplers)
        self._advance_at = advance_at
        self._stage = 0
        """Index of the current stage."""
        self._recent: deque[float] = deque(maxlen=window)
        """Rewards of the last groups of the current stage."""
        self._counts = dict.fromkeys(self._names, 0)
        """Number of draws of each stage."""
        self._open: dict[int, tuple[str, int]] = {}
        """Stage of each draw without an outcome, and its number in the stage."""

    def draw(self, number: int) -> Draw:
        if number not in self._open:
            name = self._names[self._stage]
            self._open[number] = (name, self._counts[name])
            self._counts[name] += 1
        name, inner = self._open[number]
        found = self._samplers[name].draw(inner)
        place = {"stage": name, "number": inner, "inner": found.place}
        return Draw(found.task, join_names(name, found.source), place)

    def recall(self, number: int, place: JsonObject) -> None:
        name, inner = place["stage"], int(place["number"])
        self._open[number] = (name, inner)
        self._counts[name] = max(self._counts[name], inner + 1)
        self._samplers[name].recall(inner, place["inner"])

    def observe(self, number: int, reward: float | None) -> None:
        found = self._open.pop(number, None)
        if found is None:
            return
        name, inner = found
        self._samplers[name].observe(inner, reward)
        if reward is None or name != self._names[self._stage]:
            return
        self._recent.append(reward)
        is_learned = (
            len(self._recent) == self._recent.maxlen and statistics.fmean(self._recent) >= self._advance_at
        )
        if is_learned and self._stage + 1 < len(self._names):
            self._stage += 1
            self._recent.clear()

    def state_dict(self) -> JsonObject:
        return {
            "stage": self._stage,
            "recent": list(self._recent),
            "counts": dict(self._counts),
            "open": [[number, *place] for number, place in sorted(self._open.items())],
            "inner": super().state_dict(),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        if not state:
            return
        self._stage, self._counts = state["stage"], dict(state["counts"])
        self._recent.clear()
        self._recent.extend(state["recent"])
        self._open = {number: (name, inner) for number, name, inner in state["open"]}
        super().load_state_dict(state["inner"])

    def metrics(self) -> dict[str, float]:
        return {"stage": float(self._stage), **super().metrics()}
