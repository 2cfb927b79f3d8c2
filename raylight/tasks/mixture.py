"""Tasks of several sources, in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raylight._utils.bounds import MAX_FACTOR, is_number
from raylight.errors import ConfigError
from raylight.tasks.datasets import as_task_set
from raylight.tasks.task_set import Draw, NamedSamplers, SetSampler, TaskSet, join_names, named_parts
from raylight.types import JsonObject


class Mixture(TaskSet):
    """Tasks of several sources. Metrics are shown for each (`source/NAME/reward`).

    After any number of draws, the number from each source is within one of its share. Without weights the
    shares follow the sizes. A source may itself be a mixture, a curriculum, stages or a stream.

    Args:
        sources: datasets by name.
        weights: relative weights by name; 1 for a missing one.

    Raises:
        ConfigError: no source is given, or a weight is not positive, of no source, or missing for a stream.
        DatasetError: a source cannot be read or is empty.
    """

    def __init__(self, sources: Mapping[str, object], weights: Mapping[str, float] | None = None) -> None:
        if not isinstance(sources, Mapping) or not sources or not all(isinstance(n, str) for n in sources):
            raise ConfigError(f"a Mixture has the sources {sources!r:.80}; give datasets by name")
        self.sources = {name: as_task_set(source, f"source {name!r}") for name, source in sources.items()}
        if unknown := [name for name in weights or {} if name not in sources]:
            raise ConfigError(
                f"the weights {', '.join(unknown)} are of no source; the sources are {', '.join(sources)}"
            )
        if weights is None:
            if endless := [name for name, source in self.sources.items() if source.size is None]:
                raise ConfigError(
                    f"the size of {', '.join(endless)} is not known, from which its share would follow; give "
                    "weights"
                )
            weights = {name: float(source.size or 0) for name, source in self.sources.items()}
        self.weights = {name: weights.get(name, 1.0) for name in sources}
        if wrong := {n: w for n, w in self.weights.items() if not (is_number(w, 0, MAX_FACTOR) and w)}:
            raise ConfigError(f"the weights {wrong} of a Mixture must be positive numbers")

    @property
    def size(self) -> int | None:
        sizes = [source.size for source in self.sources.values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def sampler(self, seed: int) -> MixtureSampler:
        samplers = {name: source.sampler(seed + i) for i, (name, source) in enumerate(self.sources.items())}
        return MixtureSampler(samplers, self.weights)

    def parts(self) -> list[tuple[str | None, object]]:
        return named_parts(self.sources)

    def fingerprint(self) -> JsonObject:
        return {
            "mixture": {name: source.fingerprint() for name, source in self.sources.items()},
            "weights": self.weights,
        }


class MixtureSampler(NamedSamplers):
    """Draws from the source, of those below their shares, that would first be a whole draw below its share.

    This keeps each within one draw of its share (R. Tijdeman, The chairman assignment problem, 1980). The
    source that is furthest below its share would not, if there are many.
    """

    def __init__(self, samplers: Mapping[str, SetSampler], weights: Mapping[str, float]) -> None:
        super().__init__(samplers)
        total = math.fsum(weights.values())
        self._shares = {name: weights[name] / total for name in samplers}
        self._counts = dict.fromkeys(samplers, 0)
        self._picks: list[tuple[str, int]] = []
        """Source of each number, and its number in the source."""
        self.learns = any(sampler.learns for sampler in self._samplers.values())

    def draw(self, number: int) -> Draw:
        name, inner = self._pick(number)
        found = self._samplers[name].draw(inner)
        return Draw(found.task, join_names(name, found.source), found.place)

    def recall(self, number: int, place: JsonObject) -> None:
        name, inner = self._pick(number)
        self._samplers[name].recall(inner, place)

    def observe(self, number: int, reward: float | None) -> None:
        name, inner = self._pick(number)
        self._samplers[name].observe(inner, reward)

    def _pick(self, number: int) -> tuple[str, int]:
        while len(self._picks) <= number:
            drawn = len(self._picks) + 1
            below = [name for name, share in self._shares.items() if share * drawn > self._counts[name]]
            name = min(below, key=lambda name: (self._counts[name] + 1) / self._shares[name])
            self._picks.append((name, self._counts[name]))
            self._counts[name] += 1
        return self._picks[number]
