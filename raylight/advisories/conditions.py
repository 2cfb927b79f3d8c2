"""Conditions of the advisories on the last rows of a run's metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

DRIFT_REMEDIES = {
    "answer_edited": "send answers back unchanged",
    "call_edited": "send tool calls back unchanged",
    "history_edited": "append new messages, and leave earlier ones as they are",
    "history_truncated": "raise the agent's limit on its history, or train on the rows that it makes",
    "system_edited": "keep times, states and other values that change out of the system message",
    "tools_changed": "offer the same tools, in the same order, in all calls of a conversation",
    "variables_changed": "send the same chat_template_kwargs and reasoning_effort in all calls",
    "template": "use a chat template that renders every message once and in order",
    "unsupported": "send audio in the first message only, or train on the rows that they make",
    "token_in_off": "remove the header x-raylight-token-in",
}
"""Remedies by the kind of a drift."""
SPLICING = "leave engine.token_in on, and use an engine with a tokenizer"
"""Remedy for drifts that only the tokens show."""

Find = Callable[["MetricHistory"], tuple[Any, ...] | None]
"""Condition: returns the figures of text and remedy, or None."""

MEMORY = 50
"""Training steps, and evaluations, that rules look back at."""
WINDOW = 5
"""Training steps that a finding about rewards or groups needs: one batch may be unlucky."""
FIRST = 5
"""First training steps, with which later ones are compared."""
MIN_ROLLOUTS = 32
"""Rollouts that a finding about rewards needs: a few may all fail by chance."""
MIN_COUNT = 3
"""Failures of a kind that a finding needs: one of eight is above 5 %."""
SOLVED = 0.85
"""Position of the mean reward between the lowest and the highest of the run from which most tasks count as
solved. Equal rewards and a low entropy are expected then."""
FLOOR, ABOVE_FLOOR = 0.05, 0.25
"""Positions of the mean reward that count as the floor, and as clearly above it."""
COLLAPSED_ENTROPY = 0.1
"""Fraction of the entropy at first. Runs that go on learning lose half of it or less."""
MIN_MISMATCH = 0.01
"""Mean difference of log-probs that is common in bfloat16, and harmless."""
MIN_TOKENS = 64
"""Answers up to this length may become several times longer without harm."""
STALLED_FACTOR, STALLED_S = 6.0, 30.0
"""A phase has stalled if it took so many times its median, and at least so many seconds: short phases vary
more with the load of the machine."""
MIN_STEP_S = 1.0
"""Steps shorter than this are not worth tuning."""

READ = frozenset(
    f"{group}/{name}"
    for group, names in {
        "async": "engine_idle_s trainer_idle_s",
        "critic": "skipped_steps",
        "failures": "infrastructure",
        "learner": "entropy skipped_steps",
        "mismatch": "ess logprob_abs_max logprob_abs_mean stale_fraction warned",
        "off_policy": "calls repeated_seeds",
        "serving": "replicas",
        "sessions": "begun",
        "time": "rollout_s sync_s update_s val_s",
        "trace": "calls drifts",
        "train": "aborted failed groups groups_without_signal response_tokens reward reward_max "
        "reward_min reward_std rollouts share_without_signal truncated_answers unscored",
        "val": "reward reward_error rollouts",
    }.items()
    for name in names.split()
)
"""Metrics that rules read. All metrics of the last steps would take a megabyte."""


class MetricHistory:
    """The rows that rules look at: the first training steps, the last ones, and the last evaluations."""

    def __init__(self) -> None:
        self.first: list[dict[str, float]] = []
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.lowest, self.highest = math.inf, -math.inf
        """Lowest and highest reward of the run."""

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row; metrics that are None or not finite are left out."""
        kept = {
            name: value
            for name, value in row.items()
            if (name in READ or name == "step" or name.startswith("trace/drifts_"))
            and value is not None
            and math.isfinite(value)
        }
        if "val/reward" in kept:
            self.evaluations = [*self.evaluations, kept][-MEMORY:]
        if "train/rollouts" in kept or "train/reward" in kept:
            self.steps = [*self.steps, kept][-MEMORY:]
            if len(self.first) < FIRST:
                self.first.append(kept)
        if (reward := kept.get("train/reward")) is not None:
            self.lowest = min(self.lowest, kept.get("train/reward_min", reward))
            self.highest = max(self.highest, kept.get("train/reward_max", reward))

    def last(self, count: int, *names: str) -> list[tuple[float, ...]]:
        """Return metrics of the last `count` training steps that have all of them, oldest first. A step
        without an update lacks the learner's metrics, so up to twice as many steps are looked at. Return an
        empty list if fewer have them."""
        return _select(self.steps[-2 * count :], count, *names)

    def sums(self, count: int, *names: str) -> list[float]:
        """Return the sums of metrics over the last `count` training steps; zeros if `last` is empty."""
        rows = self.last(count, *names)
        return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * len(names)

    def position(self, reward: float) -> float:
        """Return the position of a mean reward between the lowest (0) and the highest (1) reward of the run;
        0 if the run has one reward only."""
        return (reward - self.lowest) / (self.highest - self.lowest) if self.highest > self.lowest else 0.0

    @property
    def is_solved(self) -> bool:
        """True if the rewards of the last steps are close to the highest one."""
        rewards = self.last(WINDOW, "train/reward")
        return bool(rewards) and self.position(statistics.fmean(reward for (reward,) in rewards)) >= SOLVED


def _select(rows: list[dict[str, float]], count: int, *names: str) -> list[tuple[float, ...]]:
    found = [tuple(row[name] for name in names) for row in rows if all(name in row for name in names)]
    return found[-count:] if len(found) >= count else []


def _mean(rows: list[tuple[float, ...]]) -> float:
    return statistics.fmean(row[0] for row in rows)


def share(part: str, whole: str, steps: int, above: float) -> Find:
    """Return a condition on the ratio of two counts over some steps."""

    def find(history: MetricHistory) -> tuple[float] | None:
        parts, wholes = history.sums(steps, part, whole)
        return (parts / wholes,) if parts >= MIN_COUNT and parts > above * wholes else None

    return find


def count(*names: str) -> Find:
    """Return a condition on counts of the last step, one of which is above 0."""

    def find(history: MetricHistory) -> tuple[float] | None:
        total = sum(history.sums(1, name)[0] for name in names)
        return (total,) if total > 0 else None

    return find


def some_failed(history: MetricHistory) -> tuple[float] | None:
    failed, rollouts = history.sums(WINDOW, "train/failed", "train/rollouts")
    lost, _ = history.sums(WINDOW, "failures/infrastructure", "train/rollouts")
    by_agent = failed - lost
    return (
        (by_agent / rollouts,)
        if by_agent >= MIN_COUNT and 0.1 * rollouts < by_agent <= 0.5 * rollouts
        else None
    )


def one_reward(history: MetricHistory) -> tuple[float] | None:
    """Find the reward that all rollouts of the last steps have, unless their tasks are solved."""
    rows = history.last(WINDOW, "train/reward", "train/reward_std")
    (rollouts,) = history.sums(WINDOW, "train/rollouts")
    is_one = bool(rows) and rollouts >= MIN_ROLLOUTS and {std for _, std in rows} == {0.0}
    return (
        (rows[-1][0],)
        if is_one and len({reward for reward, _ in rows}) == 1 and not history.is_solved
        else None
    )


def _share_without_signal(history: MetricHistory) -> float:
    """Return the share of groups with equal rewards in the last steps; 0 if groups have one rollout."""
    if shares := history.last(WINDOW, "train/share_without_signal"):
        return _mean(shares)
    equal, groups, rollouts = history.sums(
        WINDOW, "train/groups_without_signal", "train/groups", "train/rollouts"
    )
    return equal / groups if groups and rollouts >= 1.5 * groups else 0.0


def no_signal(history: MetricHistory) -> tuple[float] | None:
    share = _share_without_signal(history)
    return (share,) if share > 0.5 and not history.is_solved and not one_reward(history) else None


def solved(history: MetricHistory) -> tuple[float, float] | None:
    share = _share_without_signal(history)
    return (share, history.highest) if share > 0.5 and history.is_solved else None


def reward_collapsed(history: MetricHistory) -> tuple[float] | None:
    """Find a mean reward at the floor, after it was clearly above."""
    rewards = [history.position(row["train/reward"]) for row in history.steps if "train/reward" in row]
    (rollouts,) = history.sums(WINDOW, "train/rollouts")
    if len(rewards) < 2 * WINDOW or rollouts < MIN_ROLLOUTS or max(rewards[-WINDOW:]) > FLOOR:
        return None
    before = [
        statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) - WINDOW + 1)
    ]
    return (_mean(history.last(WINDOW, "train/reward")),) if max(before) >= ABOVE_FLOOR else None


def truncated_answers(history: MetricHistory) -> tuple[float] | None:
    shares = history.last(3, "train/truncated_answers")
    return (_mean(shares),) if shares and _mean(shares) > 0.25 else None


def longer_answers(history: MetricHistory) -> tuple[float, float] | None:
    """Find answers several times as long as some steps before, without a higher reward."""
    name = "train/response_tokens"
    before, last = _select(history.steps[-20:-WINDOW], WINDOW, name), history.last(3, name)
    rewards = _select(history.steps[-20:-WINDOW], WINDOW, "train/reward")
    if not before or not last or not rewards:
        return None
    usual = statistics.median(length for (length,) in before)
    gained = history.position(_mean(history.last(3, "train/reward") or rewards)) - history.position(
        _mean(rewards)
    )
    is_longer = min(last)[0] > max(3 * usual, MIN_TOKENS)
    return (_mean(last), usual) if is_longer and gained < 0.1 else None


def low_entropy(history: MetricHistory) -> tuple[float, float] | None:
    first, last = _select(history.first, FIRST, "learner/entropy"), history.last(3, "learner/entropy")
    if not first or not last or history.is_solved:
        return None
    return (_mean(last), _mean(first)) if max(last)[0] < COLLAPSED_ENTROPY * _mean(first) else None


def mismatch(history: MetricHistory) -> tuple[float, float] | None:
    rows = history.last(1, "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "mismatch/warned")
    return (rows[0][0], rows[0][1]) if rows and rows[0][2] else None


def rising_mismatch(history: MetricHistory) -> tuple[float, float] | None:
    """Find a growing difference of engine and learner for the same weights."""
    name = "mismatch/logprob_abs_mean"
    first, last = _select(history.first, FIRST, name), history.last(3, name)
    if not first or not last:
        return None
    return (_mean(last), _mean(first)) if min(last)[0] > max(3 * _mean(first), MIN_MISMATCH) else None


def off_policy_tokens(history: MetricHistory) -> tuple[float] | None:
    sizes = history.last(3, "mismatch/ess")
    return (_mean(sizes),) if sizes and max(sizes)[0] < 0.5 else None


def old_weights(history: MetricHistory) -> tuple[()] | None:
    """Find batches of older weights only, in synchronous training."""
    fractions = history.last(2, "mismatch/stale_fraction")
    is_synchronous = bool(history.steps) and "async/trainer_idle_s" not in history.steps[-1]
    return () if is_synchronous and fractions and min(fractions)[0] == 1 else None


def stalled_phase(history: MetricHistory) -> tuple[str, float, float] | None:
    """Find a phase of the last step that took far longer than before."""
    phases = {"update_s": "the update", "sync_s": "the publication of weights", "val_s": "the evaluation"}
    if history.steps and "async/trainer_idle_s" not in history.steps[-1]:
        phases["rollout_s"] = "the rollouts"  # in asynchronous training the time of a whole step
    for name, phase in phases.items():
        if not history.steps or f"time/{name}" not in history.steps[-1]:
            continue
        *before, last = [row[f"time/{name}"] for row in history.steps if f"time/{name}" in row]
        if len(before) >= WINDOW and last > max(STALLED_FACTOR * statistics.median(before), STALLED_S):
            return phase, last, statistics.median(before)
    return None


def validation_falls(history: MetricHistory) -> tuple[float, float] | None:
    """Find two evaluations far below the best one, while the training reward did not fall since."""
    evaluations = [
        row
        for row in history.evaluations
        if "val/reward_error" in row and row.get("val/rollouts", 0.0) >= MIN_ROLLOUTS  # else a poor estimate
    ]
    if len(evaluations) < 4:
        return None
    best = max(evaluations, key=lambda row: row["val/reward"])
    falls = all(
        best["val/reward"] - row["val/reward"]
        > 3 * math.hypot(best["val/reward_error"], row["val/reward_error"])
        for row in evaluations[-2:]
    )
    then = _select([row for row in history.steps if row["step"] <= best["step"]], WINDOW, "train/reward")
    rewards = history.last(WINDOW, "train/reward")
    if not falls or not then or not rewards or _mean(rewards) < _mean(then):
        return None
    return evaluations[-1]["val/reward"], best["val/reward"]


def drifted_calls(history: MetricHistory) -> tuple[float, str] | None:
    drifts, calls = history.sums(WINDOW, "trace/drifts", "trace/calls")
    if drifts < MIN_COUNT or drifts <= 0.05 * calls:
        return None
    counts = {
        name.removeprefix("trace/drifts_"): history.sums(1, name)[0]
        for name in history.steps[-1]
        if name.startswith("trace/drifts_")
    }
    kind = max(counts, key=lambda name: counts[name], default="")
    return drifts / calls, DRIFT_REMEDIES.get(kind, SPLICING)


def waiting_share(name: str, per_replica: bool = False) -> Find:
    """Return a condition on the share of the time that a component of asynchronous training waits.

    It finds nothing in a run with sessions: agents outside of it set its pace.
    """

    def find(history: MetricHistory) -> tuple[float] | None:
        if history.steps and "sessions/begun" in history.steps[-1]:
            return None
        idle, seconds = history.sums(WINDOW, name, "time/rollout_s")
        replicas = history.steps[-1].get("serving/replicas", 1.0) if per_replica and history.steps else 1.0
        if seconds < MIN_STEP_S * WINDOW or len(history.steps) < 2 * WINDOW:  # the first steps fill the queue
            return None
        share = idle / (seconds * max(replicas, 1.0))
        return (share,) if share > 0.5 else None

    return find


def no_overlap(history: MetricHistory) -> tuple[float, float] | None:
    """Find long rollouts and long updates that wait for each other."""
    if not history.steps or "async/trainer_idle_s" in history.steps[-1]:
        return None
    rollouts, updates, syncs = history.sums(2 * WINDOW, "time/rollout_s", "time/update_s", "time/sync_s")
    seconds, learning = rollouts + updates + syncs, updates + syncs
    if seconds < MIN_STEP_S * 2 * WINDOW or min(rollouts, learning) < 0.35 * seconds:
        return None
    return rollouts / (2 * WINDOW), learning / (2 * WINDOW)
