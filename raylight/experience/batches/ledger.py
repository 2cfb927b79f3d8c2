"""Ledger of the tokens that training rollouts sampled: each is trained, masked, auxiliary, unselected,
dropped, failed or open.

The store counts the tokens of each call with its record. The ledger counts those that the training steps
took, by what became of them. Both are equal at any time; `unaccounted` is their difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass

from raylight.experience.batches.batch import BatchReport
from raylight.experience.batches.lengths import count_by_length
from raylight.experience.opponents import model_of_call
from raylight.experience.trajectories.reward_rules import count_sampled
from raylight.types import FinishedRollout, JsonObject, RolloutTokens, TokenTotals


@dataclass(frozen=True)
class TakenTokens:
    """Tokens of the rollouts that training steps took; two of them can be added."""

    trained: int = 0
    """Tokens in the loss of an update."""
    masked: int = 0
    """Tokens of a batch's rollouts that no gradient came from: forced, off-policy, stale, of aborted calls,
    of agents that are not trained, of rows or groups that were left out, of greedy baselines, and of batches
    without signal."""
    auxiliary: int = 0
    """Tokens of auxiliary calls, which are not trained unless `train_auxiliary_calls` asks for it."""
    unselected: int = 0
    """Tokens of rows that `trajectory_selection` left out."""
    dropped: int = 0
    """Tokens of groups that were replaced."""
    failed: int = 0
    """Tokens of attempts that failed or were replaced, and of rollouts that a batch excludes."""
    late: int = 0
    """Tokens among these that were recorded after their rollout was decided."""

    def __add__(self, other: TakenTokens) -> TakenTokens:
        return TakenTokens(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class LedgerRow:
    """State of the ledger: numbers of tokens since the start of the run."""

    generated: int
    """All tokens, as the store counts them."""
    trained: int
    masked: int
    auxiliary: int
    unselected: int
    dropped: int
    failed: int
    open: int
    """Tokens of rollouts that no training step took."""

    @property
    def unaccounted(self) -> int:
        """Tokens that are missing in the ledger (or in the store, if below 0). It closes if this is 0."""
        fates = asdict(self)
        return fates.pop("generated") - sum(fates.values())

    def metrics(self) -> dict[str, float]:
        counts = {**asdict(self), "unaccounted": self.unaccounted}
        return {f"ledger/{name}": float(count) for name, count in counts.items()}


class Ledger:
    """Tokens of the training rollouts that the steps of a lineage took. Before steps are taken again, the
    state of that time is loaded."""

    def __init__(self) -> None:
        self._taken = TakenTokens()
        self._lengths: Counter[str] = Counter()
        """Tokens of the rollouts that steps took, by the class of the rollout's length and their fate."""
        self._models: Counter[str] = Counter()
        """Tokens of the latest attempts that steps took, by model and fate, in a run with several models."""

    def take(
        self,
        rollouts: list[FinishedRollout],
        report: BatchReport,
        counts: Mapping[str, RolloutTokens],
        dropped: Iterable[str] = (),
    ) -> None:
        """Enter the rollouts that a step took.

        Args:
            rollouts: rollouts that its batch was built from.
            report: report of the batch.
            counts: the store's counts of these rollouts and of the dropped ones.
            dropped: ids of the rollouts of dropped groups.
        """
        collected = {item.rollout.rollout_id: count_sampled(item.generations) for item in rollouts}
        trained = report.trained_tokens if report.has_signal else 0
        late = sum(_count_late(seen, counts[name]) for name, seen in collected.items())
        lost = [counts[name] for name in dropped]
        self._taken += TakenTokens(
            trained=trained,
            masked=sum(collected.values())
            - trained
            - report.excluded_tokens
            - report.auxiliary_tokens
            - report.unselected_tokens,
            auxiliary=report.auxiliary_tokens,
            unselected=report.unselected_tokens,
            dropped=sum(count.latest for count in lost),
            failed=report.excluded_tokens
            + sum(counts[name].earlier for name in collected)
            + sum(count.earlier for count in lost),
            late=late,
        )
        if report.models:
            self._models.update(_by_model(rollouts, report))
        seen = [*collected.values(), *(count.latest for count in lost)]
        for fate, tokens in {
            "sampled": count_by_length((n, n) for n in seen),
            "trained": report.trained_by_length if report.has_signal else {},
            "stale": report.stale_by_length,
            "dropped": count_by_length((count.latest, count.latest) for count in lost),
        }.items():
            self._lengths.update({f"{bound}/{fate}": n for bound, n in tokens.items()})

    def row(self, totals: TokenTotals) -> LedgerRow:
        """Return the state of the ledger.

        Args:
            totals: the store's counts, in which all rollouts are open that no step in the ledger took.
        """
        taken = self._taken
        return LedgerRow(
            generated=totals.sampled + totals.late,
            trained=taken.trained,
            masked=taken.masked,
            auxiliary=taken.auxiliary,
            unselected=taken.unselected,
            dropped=taken.dropped,
            failed=taken.failed + totals.late - taken.late,
            open=totals.open,
        )

    def length_metrics(self) -> dict[str, float]:
        """Return the metrics of tokens by the length of their rollout."""
        return {f"lengths/{name}": float(count) for name, count in sorted(self._lengths.items())}

    def model_metrics(self) -> dict[str, float]:
        """Return the metrics of tokens by model; none in a run with one model."""
        return {f"ledger/model/{name}": float(count) for name, count in sorted(self._models.items())}

    def state_dict(self) -> JsonObject:
        """Return the sums as plain JSON."""
        return asdict(self._taken) | {"lengths": dict(self._lengths), "models": dict(self._models)}

    def load_state_dict(self, state: JsonObject) -> None:
        """Continue from the result of `state_dict`; an empty one stands for the first step."""
        sums = dict(state)
        self._lengths = Counter(sums.pop("lengths", {}))
        self._models = Counter(sums.pop("models", {}))
        self._taken = TakenTokens(**sums)


def _by_model(rollouts: list[FinishedRollout], report: BatchReport) -> Counter[str]:
    """Return the tokens that each model sampled for a step, those in the loss, and the others."""
    counts: Counter[str] = Counter()
    for item in rollouts:
        for call in item.generations:
            counts[f"{model_of_call(call.model)}/sampled"] += len(call.output_ids)
    sampled = {name.removesuffix("/sampled"): tokens for name, tokens in counts.items()}
    for model in sampled.keys() | set(report.models):
        trained = report.trained_by_model[model]
        counts[f"{model}/trained"] = trained
        counts[f"{model}/untrained"] = sampled.get(model, 0) - trained
    return counts


def _count_late(collected: int, count: RolloutTokens) -> int:
    """Return how many of a rollout's tokens the store recorded after the rollout was decided."""
    return min(max(collected - count.latest, 0), count.late)
