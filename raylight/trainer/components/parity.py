"""Parity of engines and learner: both compute the log-probs of a short probe prompt, at the start and after
each version.

Loading weights checks names and shapes only, and a checksum shows only that they arrived. A stale tensor
(vLLM's repacked copy of a tied output layer, a kernel's own layout) becomes visible in the engine's output,
so the output is compared.
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
from raylight.experience.settings.correction_settings import TAIL_FACTOR

PROBE_TOKENS = 128
"""Tokens of the probe, if the model takes as many: so many that their mean hardly depends on which they
are."""
SPIKE = TAIL_FACTOR
"""Factor by which a single token may exceed the tolerance, which is for the mean: unlikely tokens, such as
a probe's, have the largest rounding errors."""
CONCLUSIVE = 3.0
"""Factor by which the learner's change must exceed the usual difference of engine and learner to be
conclusive. Rounding alone changes the learner's log-probs by at most 1.4 times that difference."""
MAX_GROWTH = 2.0
"""Factor by which the difference of engine and learner may exceed the usual one."""
MAX_STALE_SHARE = 0.05
"""Share of the learner's change by which an engine with the new weights may differ from it in addition. On
small models a stale output layer alone accounts for 6% to 30%."""
RENEWAL = MAX_GROWTH / MAX_STALE_SHARE
"""Factor by which the learner's change must exceed the usual difference before later versions are compared
with a newer one."""
MIN_NOISE = 1e-6


@dataclass(frozen=True)
class Parity:
    """Absolute difference of the log-probs of engine and learner."""

    max_abs: float
    mean_abs: float
    tokens: int


def make_probe(model_path: str, max_model_len: int, seed: int = 0) -> list[int]:
    """Return the token ids of the probe prompt for the model of a Hugging Face folder.

    It is random but always the same, and avoids the ends of the vocabulary, where special tokens are.

    Args:
        max_model_len: longest prompt plus response of the engine, which samples a token after a prompt.

    Raises:
        EngineStartError: config.json has no `vocab_size`.
    """
    config = json.loads(Path(model_path, "config.json").read_text())
    config |= config.get("text_config", {})
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise EngineStartError(
            f"{model_path}/config.json has no vocab_size, so it is not the folder of a language model; give "
            "another model"
        )
    length = min(PROBE_TOKENS, max_model_len - 1, config.get("max_position_embeddings", max_model_len) - 1)
    draw = random.Random(seed)
    return [draw.randrange(vocabulary // 4, max(vocabulary // 2, vocabulary // 4 + 1)) for _ in range(length)]


def compare(engine: Sequence[float], learner: Sequence[float], tolerance: float) -> Parity:
    """Compare an engine's log-probs with the learner's for the same tokens.

    Args:
        tolerance: limit of the mean absolute difference; the trainer uses `max_logprob_mismatch`.

    Raises:
        MismatchError: the difference exceeds the tolerance or is NaN.
    """
    if len(engine) != len(learner) or not learner:
        raise MismatchError(
            f"the engine returned {len(engine)} log-probs of the probe and the learner {len(learner)}; use "
            "the same model folder for both"
        )
    differences = [abs(a - b) for a, b in zip(engine, learner, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    parity = Parity(worst, statistics.fmean(differences), len(differences))
    if not (parity.mean_abs <= tolerance and parity.max_abs <= SPIKE * tolerance):  # true for NaN
        raise MismatchError(
            f"log-probs of engine and learner differ by {parity.mean_abs:.2g} on average and up to "
            f"{parity.max_abs:.2g} on a probe of {parity.tokens} tokens, more than {tolerance:g}. Either "
            "they compute from different weights (another model folder, a quantised engine, a layer that "
            "the engine did not load) or in different precision. Compare the dtype of engine and learner; "
            "max_logprob_mismatch sets the limit"
        )
    return parity


class ParityMonitor:
    """Compares the probes of every version and detects stale engines.

    A step may change log-probs by much less than the tolerance, so one comparison cannot detect a stale
    engine. But a stale engine's log-probs stay as they are while the learner's change. Once the learner's
    have changed by a few times the usual difference of engine and learner, an engine with the weights still
    has about the usual difference, an engine without them differs by the change, and one without some of them
    by a part of it: the usual difference in half precision is about 0.05, and 1e-6 in float32.

    Args:
        tolerance: as for `compare`.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._reference: _Reference | None = None

    def check(self, version: int, engines: Mapping[str, Sequence[float]], learner: Sequence[float]) -> Parity:
        """Compare each replica's log-probs of the probe with the learner's; return the parity of the worst
        replica.

        Args:
            engines: log-probs by replica.

        Raises:
            MismatchError: a replica differs by more than the tolerance, or is stale.
        """
        if not engines:
            raise MismatchError(
                f"weight version {version}: no replica returned log-probs of the probe; see the replicas' "
                "logs with `ray logs`"
            )
        parities = {}
        for replica, logprobs in engines.items():
            try:
                parities[replica] = compare(logprobs, learner, self._tolerance)
            except MismatchError as error:
                raise MismatchError(f"weight version {version}, replica {replica}: {error}") from None
        worst = max(parities, key=lambda replica: parities[replica].mean_abs)
        self._check_fresh(version, worst, parities[worst].mean_abs, learner)
        return parities[worst]

    def _check_fresh(self, version: int, replica: str, difference: float, learner: Sequence[float]) -> None:
        reference = self._reference
        if reference is None:
            self._reference = _Reference(version, tuple(learner), max(difference, MIN_NOISE))
            return
        change = statistics.fmean(abs(a - b) for a, b in zip(learner, reference.learner, strict=True))
        if change <= CONCLUSIVE * reference.noise:
            return  # inconclusive; the next version is compared with the same reference
        if difference > MAX_GROWTH * reference.noise + MAX_STALE_SHARE * change:
            raise MismatchError(
                f"replica {replica} lacks some of the weights of version {version}: since version "
                f"{reference.version} the learner's log-probs of the probe changed by {change:.2g} on "
                f"average, and the replica's differ from them by {difference:.2g} (usual: "
                f"{reference.noise:.2g}). A tensor was not loaded; check that a tied output layer is "
                "exported too"
            )
        if change > RENEWAL * reference.noise:  # sooner, what a stale layer adds would pass as rounding
            self._reference = _Reference(version, tuple(learner), (difference + reference.noise) / 2)


@dataclass(frozen=True)
class _Reference:
    """The last version that all engines verifiably had.

    Attributes:
        learner: the learner's log-probs of the probe.
        noise: the usual difference of engine and learner.
    """

    version: int
    learner: tuple[float, ...]
    noise: float
