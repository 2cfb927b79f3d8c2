"""The baseline: run the agent on samples and show what it did. Trains nothing."""

from __future__ import annotations

import logging
import statistics
import textwrap
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raylight.algorithms.base import FastAlgorithm
from raylight.config import Config
from raylight.errors import DatasetError
from raylight.store.client import StoreClient
from raylight.types import WAITING, Attempt, EnqueueRolloutRequest, FinishedRollout, RolloutMode, Span

logger = logging.getLogger(__name__)

Verbosity = Literal["keys", "key_values", "none"]
SHOWN_CHARACTERS = 300
"""Of a sample, an attribute or what the adapter made."""


class BaselineSettings(Config):
    """The arguments of `Baseline`, checked."""

    n_epochs: int = Field(ge=1)
    train_split: float = Field(gt=0, lt=1)
    polling_interval: float | None = Field(gt=0, allow_inf_nan=False)
    max_queue_length: int = Field(ge=1)
    span_verbosity: Verbosity


class Baseline(FastAlgorithm):
    """Runs the agent on every sample, and shows each rollout with its attempts, spans and reward, and a summary at the end.

    What it shows is printed (unless its trainer has `progress=False`), and logged at level INFO by the logger of this module. After
    `run`, `summary` has the figures.

    Args:
        n_epochs: passes over the samples.
        train_split: share of the training dataset that is run in mode "train", in its order; the rest is run in mode "val", so that
            both ways of the agent are tried. Used only where there is no validation dataset.
        polling_interval: seconds without a finished rollout after which a line tells how far things are, and the queue is filled
            up again; None never does. Rollouts that finish are shown at once, whatever this is.
        max_queue_length: rollouts that wait for a runner at once.
        span_verbosity: show the names of the spans' attributes, these with their values, or no spans.
        served_model: folder or name of a model that the run serves to agents, as `llm` or where an LLM has no endpoint; None: none.

    Raises:
        ConfigError: an argument does not fit.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float | None = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Verbosity = "keys",
        served_model: str | None = None,
    ) -> None:
        self.served_model = served_model
        self.settings = BaselineSettings(
            n_epochs=n_epochs,
            train_split=train_split,
            polling_interval=polling_interval,
            max_queue_length=max_queue_length,
            span_verbosity=span_verbosity,
        )
        self.summary: dict[str, Any] | None = None

    @property
    def n_epochs(self) -> int:
        """Passes over the samples."""
        return self.settings.n_epochs

    @n_epochs.setter
    def n_epochs(self, n_epochs: int) -> None:
        self.settings = BaselineSettings(**self.settings.model_dump() | {"n_epochs": n_epochs})

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Run every sample `n_epochs` times.

        Raises:
            DatasetError: there are no samples.
            ConfigError: there is no store.
        """
        store, resources = self.get_store(), self.get_initial_resources()
        samples = split_samples(
            listed(train_dataset, "train_dataset"),
            listed(val_dataset, "val_dataset"),
            self.settings.train_split,
        )
        if resources and self._trainer is None:  # a trainer has stored them already
            await store.add_resources(resources)
        requests = [EnqueueRolloutRequest(input=task, mode=mode) for mode, task in samples]
        shown = self._trainer is None or getattr(self.get_trainer(), "progress", True)
        report, n_epochs = BaselineReport(Console(quiet=not shown)), self.settings.n_epochs
        for epoch in range(1, n_epochs + 1):
            modes = Counter(mode for mode, _ in samples)
            report.say(
                f"epoch {epoch}/{n_epochs}: "
                + ", ".join(f"{count} in mode {mode!r}" for mode, count in modes.items())
            )
            await self._epoch(store, requests, report)
        self.summary = report.summary()
        report.show_summary(self.summary)

    async def _epoch(
        self, store: StoreClient, requests: list[EnqueueRolloutRequest], report: BaselineReport
    ) -> None:
        """Run every request once, with few of them in the queue at a time."""
        left, running, done = deque(requests), set[str](), 0
        while left or running:
            room = await self._room(store, len(left), running)
            queued = await store.enqueue_many_rollouts([left.popleft() for _ in range(room)])
            running |= {rollout.rollout_id for rollout in queued}
            interval = self.settings.polling_interval
            decided = await store.wait_for_rollouts(rollout_ids=sorted(running), at_least=1, timeout=interval)
            for finished in await store.collect([rollout.rollout_id for rollout in decided]):
                done += 1
                await self._show(store, finished, f"{done}/{len(requests)}", report)
            running -= {rollout.rollout_id for rollout in decided}
            if not decided:
                report.say(f"{done}/{len(requests)} finished; {await _where(store)}", style="dim")

    async def _room(self, store: StoreClient, left: int, running: set[str]) -> int:
        """How many rollouts may join the queue; at least one where there is nothing of ours to wait for."""
        if not left:
            return 0
        counts = await store.statistics()
        waiting = sum(counts.get(f"rollouts_{status}", 0) for status in WAITING)
        return min(left, max(self.settings.max_queue_length - waiting, 0 if running else 1))

    async def _show(
        self, store: StoreClient, finished: FinishedRollout, place: str, report: BaselineReport
    ) -> None:
        rollout_id = finished.rollout.rollout_id
        attempts = await store.query_attempts(rollout_id)
        spans = await store.query_spans(rollout_id) if self.settings.span_verbosity != "none" else []
        report.rollout(finished, place)
        for attempt in attempts:
            report.attempt(attempt)
            for span in spans:
                if span.attempt_id == attempt.attempt_id:
                    report.span(span, with_values=self.settings.span_verbosity == "key_values")
        if self._adapter is not None and attempts:
            adapted = self._adapter.adapt(await store.query_spans(rollout_id, "latest"))
            report.say(f"  {type(self._adapter).__name__} makes of it: {_short(adapted)}")


@dataclass
class BaselineReport:
    """Shows rollouts, and keeps what the summary needs of them."""

    console: Console = field(default_factory=Console)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """By mode, of rollouts that succeeded and were scored."""
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many rollouts of a mode ended so."""
    failures: Counter[str] = field(default_factory=Counter)
    """By error, of rollouts that did not succeed."""
    traced: set[str] = field(default_factory=set)
    """Errors whose traceback was shown."""

    def _log(self, text: str) -> None:
        """What the console shows already is logged below the level at which logs are usually shown."""
        logger.log(logging.INFO if self.console.quiet else logging.DEBUG, "%s", text)

    def say(self, text: str, style: str | None = None) -> None:
        self._log(text)
        self.console.print(Text(text, style=style or ""), soft_wrap=True)

    def rollout(self, finished: FinishedRollout, place: str) -> None:
        """A decided rollout in one line."""
        rollout, mode = finished.rollout, finished.rollout.mode or "-"
        succeeded = rollout.status == "succeeded"
        self.statuses[mode, rollout.status] += 1
        if succeeded and finished.reward is not None:
            self.rewards.setdefault(mode, []).append(finished.reward)
        if not succeeded:
            failure = rollout.attempt.failure if rollout.attempt else None
            self.failures[failure.error if failure else rollout.status] += 1
        reward = "no reward" if finished.reward is None else f"reward {finished.reward:g}"
        calls = len(finished.generations)
        self.say(
            f"{place} {rollout.rollout_id} ({mode}) {rollout.status}, {reward}{_duration(rollout.start_time, rollout.end_time)}"
            f"{f', {calls} calls of the model' if calls else ''}: {_short(rollout.input)}",
            style="green" if succeeded else "red",
        )

    def attempt(self, attempt: Attempt) -> None:
        """An attempt and, if it failed, why; the traceback is shown once for each error."""
        by = f" by {attempt.worker_id}" if attempt.worker_id else ""
        self.say(
            f"  attempt {attempt.sequence_id}{by}: {attempt.status}{_duration(attempt.start_time, attempt.end_time)}"
        )
        if (failure := attempt.failure) is None:
            return
        self.say(f"    {failure.kind}: {failure.error}", style="red")
        if failure.trace and failure.error not in self.traced:
            self.say(textwrap.indent(failure.trace.rstrip(), " " * 6), style="dim")
        self.traced.add(failure.error)

    def span(self, span: Span, with_values: bool) -> None:
        failed = f" {span.status.status_code}" if span.status.status_code == "ERROR" else ""
        keys = "" if with_values or not span.attributes else f": {', '.join(span.attributes)}"
        self.say(
            f"    #{span.sequence_id} {span.name}{failed}{_duration(span.start_time, span.end_time)}{keys}"
        )
        for key, value in span.attributes.items() if with_values else ():
            self.say(f"      {key} = {_short(value)}")

    def summary(self) -> dict[str, Any]:
        """Counts, the mean reward of what succeeded and was scored (None if nothing was), and failures by error."""
        rewards = [reward for of_mode in self.rewards.values() for reward in of_mode]
        succeeded = sum(count for (_, status), count in self.statuses.items() if status == "succeeded")
        return {
            "rollouts": self.statuses.total(),
            "succeeded": succeeded,
            "unscored": succeeded - len(rewards),
            "mean_reward": statistics.fmean(rewards) if rewards else None,
            "mean_reward_by_mode": {
                mode: statistics.fmean(of_mode) for mode, of_mode in self.rewards.items()
            },
            "failures": dict(self.failures.most_common()),
        }

    def show_summary(self, summary: dict[str, Any]) -> None:
        self._log(f"summary: {summary}")
        table = Table("mode", "rollouts", "succeeded", "mean reward", title="baseline")
        for mode in dict.fromkeys(mode for mode, _ in self.statuses):
            count = sum(n for (of_mode, _), n in self.statuses.items() if of_mode == mode)
            mean = summary["mean_reward_by_mode"].get(mode)
            table.add_row(
                mode,
                str(count),
                str(self.statuses[mode, "succeeded"]),
                "-" if mean is None else f"{mean:.3f}",
            )
        mean = summary["mean_reward"]
        table.add_row(
            "all", str(summary["rollouts"]), str(summary["succeeded"]), "-" if mean is None else f"{mean:.3f}"
        )
        self.console.print(table)
        if summary["unscored"]:
            self.say(
                f"{summary['unscored']} succeeded without a reward; return a float from the agent, or call emit_reward",
                "yellow",
            )
        for error, count in summary["failures"].items():
            self.say(f"{count} failed: {error}", style="red")


def split_samples(
    train: Sequence[Any], val: Sequence[Any], train_split: float
) -> list[tuple[RolloutMode, Any]]:
    """Samples with their modes. Without `val` the last of `train` take its place, and neither mode goes without if there are two.

    Raises:
        DatasetError: there are no samples.
    """
    if not train and not val:
        raise DatasetError(
            "there is nothing to run the agent on; give a train_dataset or a val_dataset with at least one sample"
        )
    if not val:
        n_train = max(min(round(len(train) * train_split), len(train) - 1), 1)
        train, val = train[:n_train], train[n_train:]
    return [*(("train", task) for task in train), *(("val", task) for task in val)]


def listed(dataset: Any, name: str) -> list[Any]:
    """All samples of a dataset, which need only have a length and an index."""
    if dataset is None:
        return []
    if isinstance(dataset, str | bytes | dict) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise DatasetError(
            f"{name} is a {type(dataset).__name__}; pass a list (or another sequence) of tasks"
        )
    return [dataset[i] for i in range(len(dataset))]


async def _where(store: StoreClient) -> str:
    """Where the undecided rollouts are."""
    counts = await store.statistics()
    waiting = sum(counts.get(f"rollouts_{status}", 0) for status in WAITING)
    running = sum(counts.get(f"rollouts_{status}", 0) for status in ("preparing", "running"))
    hint = "" if running else " (no runner takes them: are there any?)"
    return f"{running} running, {waiting} waiting for a runner{hint}"


def _duration(start: float | None, end: float | None) -> str:
    return "" if start is None or end is None else f", {end - start:.2f} s"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"
