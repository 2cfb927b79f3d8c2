"""Whether engines and learner compute the same: the log-probs of a short probe prompt, on both sides.

Loading checks names and shapes, and a checksum of what was sent would tell only that it arrived. A stale tensor (vLLM's repacked
copy of a tied output layer, a kernel's own layout) shows in what the engine computes, so that is what is compared, at the start
and after each version.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raylight.errors import EngineStartError, MismatchError

START_TOKENS = 32
SYNC_TOKENS = 16
"""Length of the probe at the start of a run, and after each version."""
SPIKE = 4.0
"""How many times the tolerance a single token may differ. The tolerance is for the mean, as the log-probs of unlikely tokens, which
a probe's are, round worst."""
SIGNIFICANT = 100.0
"""How many times the usual difference of the two sides the learner must have changed before that tells anything."""
FOLLOWS = 0.05
"""Share of that change by which an engine that has the new weights may then differ from the learner. A stale output layer alone
makes up 6% to 30% of it on small models."""
LEAST_NOISE = 1e-6


@dataclass(frozen=True)
class Parity:
    """How far apart the log-probs of two sides are."""

    max_abs: float
    mean_abs: float
    tokens: int


def vocabulary_of(model_path: str) -> int:
    """Number of tokens that a Hugging Face model in a folder knows.

    Raises:
        EngineStartError: its configuration does not tell.
    """
    config = json.loads(Path(model_path, "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise EngineStartError(
            f"{model_path}/config.json is not that of a language model: it has no vocab_size, so serving would fail"
        )
    return size


def probe_ids(vocabulary: int, length: int, seed: int = 0) -> list[int]:
    """A prompt that says nothing, always the same: ids from the middle of the vocabulary, as special tokens are at its ends.
    A shorter one is the beginning of a longer one.
    """
    draw = random.Random(seed)
    return [draw.randrange(vocabulary // 4, max(vocabulary // 2, vocabulary // 4 + 1)) for _ in range(length)]


def compare(engine: Sequence[float], learner: Sequence[float], tolerance: float) -> Parity:
    """How far an engine's log-probs are from the learner's for the same tokens.

    Args:
        tolerance: for the mean absolute difference; 1e-3 where both compute in float32, 0.5 otherwise, is what the trainer takes.

    Raises:
        MismatchError: further than allowed, or not a number; the message says what to do.
    """
    if len(engine) != len(learner) or not learner:
        raise MismatchError(
            f"the engine answered the probe with {len(engine)} log-probs, and the learner with {len(learner)}"
        )
    differences = [abs(a - b) for a, b in zip(engine, learner, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    found = Parity(worst, statistics.fmean(differences), len(differences))
    if not (found.mean_abs <= tolerance and found.max_abs <= SPIKE * tolerance):  # also when it is NaN
        raise MismatchError(
            f"log-probs of engine and learner differ by {found.mean_abs:.2g} on average and up to {found.max_abs:.2g} on a probe "
            f"of {found.tokens} tokens, more than {tolerance:g}. Either they do not compute from the same weights (another model "
            "folder, a quantised engine, a layer that the engine did not take), or in different precision: compare the dtype of "
            "engine and learner; max_logprob_mismatch sets the limit"
        )
    return found


class ParityWatch:
    """Compares the probes of every version, and notices engines that stay behind.

    A step may change log-probs by far less than the tolerance, so that one comparison passes a stale engine. But it stays where it
    is while the learner moves away. Once the learner's probe has changed by many times the usual difference of the two sides, an
    engine that has the weights still differs by about the usual, and one that lacks some of them by a good part of the change.

    Args:
        tolerance: of `compare`.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._anchor: _Anchor | None = None

    def check(self, version: int, engines: Mapping[str, Sequence[float]], learner: Sequence[float]) -> Parity:
        """Compare each replica's log-probs of `probe_ids` with the learner's; returns how far the furthest replica is.

        Raises:
            MismatchError: a replica differs by more than the tolerance, or has not followed the learner.
        """
        if not engines:
            raise MismatchError(f"weight version {version}: no replica answered the probe")
        found = {}
        for replica, logprobs in engines.items():
            try:
                found[replica] = compare(logprobs, learner, self._tolerance)
            except MismatchError as error:
                raise MismatchError(f"weight version {version}, replica {replica}: {error}") from None
        worst = max(found, key=lambda replica: found[replica].mean_abs)
        self._must_follow(version, worst, found[worst].mean_abs, learner)
        return found[worst]

    def _must_follow(self, version: int, replica: str, difference: float, learner: Sequence[float]) -> None:
        anchor = self._anchor
        if anchor is None:
            self._anchor = _Anchor(version, tuple(learner), max(difference, LEAST_NOISE))
            return
        moved = statistics.fmean(
            abs(a - b) for a, b in zip(learner, anchor.learner, strict=False)
        )  # one may be shorter
        if moved <= SIGNIFICANT * anchor.noise:
            return  # too little to tell; the next version is compared with the same anchor
        if difference > FOLLOWS * moved:
            raise MismatchError(
                f"replica {replica} lacks some of the weights of version {version}: since version {anchor.version} the learner's "
                f"log-probs of the probe changed by {moved:.2g} on average, and the engine's differ from them by {difference:.2g}, "
                f"where the usual is {anchor.noise:.2g}. A tensor was not loaded: is a tied output layer among the exported ones?"
            )
        self._anchor = _Anchor(version, tuple(learner), max(difference, anchor.noise))


@dataclass(frozen=True)
class _Anchor:
    """The last version that the engines certainly had: the learner's probe then, and the usual difference of the two sides."""

    version: int
    learner: tuple[float, ...]
    noise: float
