"""Baseline: run the agent on samples and print its rollouts, without training."""

from __future__ import annotations

import logging
import statistics
import textwrap
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raylight._utils.bounds import MAX_COUNT, MAX_SECONDS
from raylight.algorithms.base import FastAlgorithm
from raylight.base_config import Config
from raylight.errors import DatasetError
from raylight.store.client import StoreClient
from raylight.types import (
    WAITING,
    Attempt,
    EnqueueRolloutRequest,
    FinishedRollout,
    JsonObject,
    RolloutMode,
    Span,
)

logger = logging.getLogger(__name__)

Verbosity = Literal["keys", "key_values", "none"]
EXCERPT_CHARACTERS = 300
"""Printed characters of a sample, an attribute or the adapter's result."""


class BaselineSettings(Config):
    """Validated arguments of `Baseline`."""

    n_epochs: int = Field(ge=1, le=MAX_COUNT)
    train_split: float = Field(gt=0, lt=1)
    polling_interval: float | None = Field(gt=0, le=MAX_SECONDS)
    max_queue_length: int = Field(ge=1, le=MAX_COUNT)
    span_verbosity: Verbosity


class Baseline(FastAlgorithm):
    """Algorithm that runs the agent on every sample and prints each rollout, then a summary.

    A rollout is printed with its attempts, spans and reward, unless the trainer has `progress=False`. The
    same lines go to this module's logger: at level INFO if nothing is printed, else at DEBUG. After `run`,
    `summary` holds the figures.

    Args:
        n_epochs: passes over the samples.
        train_split: share of the training dataset that runs in mode "train"; the rest, from its end, runs in
            mode "val", so that both modes of the agent are tried. Ignored if there is a validation dataset.
        polling_interval: seconds without a finished rollout after which progress is printed and the queue is
            refilled; None: never. Finished rollouts are printed immediately in any case.
        max_queue_length: most rollouts that wait for a runner at a time.
        span_verbosity: "keys" prints the names of span attributes, "key_values" also their values, "none" no
            spans.
        served_model: folder or name of a model that the run serves to agents, as `llm` or for every LLM
            without an endpoint; None: no model.

    Raises:
        ConfigError: an argument is out of range.
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
        self.summary: JsonObject | None = None

    @property
    def n_epochs(self) -> int:
        """Passes over the samples."""
        return self.settings.n_epochs

    @n_epochs.setter
    def n_epochs(self, n_epochs: int) -> None:
        self.settings = BaselineSettings(**self.settings.model_dump() | {"n_epochs": n_epochs})

    async def run(self, train_dataset: object = None, val_dataset: object = None) -> None:
        """Run every sample `n_epochs` times.

        Raises:
            DatasetError: there are no samples, or a dataset is not a sequence.
            ConfigError: no store is set.
        """
        store, resources = self.get_store(), self.get_initial_resources()
        samples = split_samples(
            as_list(train_dataset, "train_dataset"),
            as_list(val_dataset, "val_dataset"),
            self.settings.train_split,
        )
        if resources and self._trainer is None:  # a trainer stores them before `run`
            await store.add_resources(resources)
        requests = [EnqueueRolloutRequest(input=task, mode=mode) for mode, task in samples]
        prints = self._trainer is None or getattr(self.get_trainer(), "progress", True)
        report, n_epochs = BaselineReport(Console(quiet=not prints)), self.settings.n_epochs
        for epoch in range(1, n_epochs + 1):
            modes = Counter(mode for mode, _ in samples)
            report.print(
                f"epoch {epoch}/{n_epochs}: "
                + ", ".join(f"{count} in mode {mode!r}" for mode, count in modes.items())
            )
            await self._epoch(store, requests, report)
        self.summary = report.summary()
        report.print_summary(self.summary)

    async def _epoch(
        self, store: StoreClient, requests: list[EnqueueRolloutRequest], report: BaselineReport
    ) -> None:
        """Run every request once, with at most `max_queue_length` of them in the queue at a time."""
        left, running, done = deque(requests), set[str](), 0
        while left or running:
            free = await self._free_slots(store, len(left), running)
            queued = await store.enqueue_many_rollouts([left.popleft() for _ in range(free)])
            running |= {rollout.rollout_id for rollout in queued}
            interval = self.settings.polling_interval
            decided = await store.wait_until_decided(
                rollout_ids=sorted(running), at_least=1, timeout=interval
            )
            for finished in await store.collect(decided):
                done += 1
                await self._print_rollout(store, finished, f"{done}/{len(requests)}", report)
            running -= set(decided)
            if not decided:
                report.print(f"{done}/{len(requests)} finished; {await _describe_queue(store)}", style="dim")

    async def _free_slots(self, store: StoreClient, left: int, running: set[str]) -> int:
        """Return the number of rollouts to enqueue now: at least one if none of this run's is undecided."""
        if not left:
            return 0
        counts = await store.statistics()
        waiting = sum(counts.get(f"rollouts_{status}", 0) for status in WAITING)
        return min(left, max(self.settings.max_queue_length - waiting, 0 if running else 1))

    async def _print_rollout(
        self, store: StoreClient, finished: FinishedRollout, position: str, report: BaselineReport
    ) -> None:
        rollout_id = finished.rollout.rollout_id
        attempts = await store.query_attempts(rollout_id)
        spans = await store.query_spans(rollout_id) if self.settings.span_verbosity != "none" else []
        report.rollout(finished, position)
        for attempt in attempts:
            report.attempt(attempt)
            for span in spans:
                if span.attempt_id == attempt.attempt_id:
                    report.span(span, with_values=self.settings.span_verbosity == "key_values")
        if self._adapter is not None and attempts:
            adapted = self._adapter.adapt(await store.query_spans(rollout_id, "latest"))
            report.print(f"  {type(self._adapter).__name__} returns: {_excerpt(adapted)}")


@dataclass
class BaselineReport:
    """Printer of rollouts, which also collects the figures of the summary."""

    console: Console = field(default_factory=Console)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Mode -> rewards of the rollouts that succeeded and have one."""
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(mode, status) -> number of rollouts."""
    failures: Counter[str] = field(default_factory=Counter)
    """Error -> number of rollouts that ended with it."""
    printed_traces: set[str] = field(default_factory=set)
    """Errors whose traceback has been printed."""

    def _log(self, text: str) -> None:
        """Log at INFO if nothing is printed, else at DEBUG, so that a terminal does not show a line twice."""
        logger.log(logging.INFO if self.console.quiet else logging.DEBUG, "%s", text)

    def print(self, text: str, style: str | None = None) -> None:
        """Log and print a line."""
        self._log(text)
        self.console.print(Text(text, style=style or ""), soft_wrap=True)

    def rollout(self, finished: FinishedRollout, position: str) -> None:
        """Print a decided rollout in one line and count it."""
        rollout, mode = finished.rollout, finished.rollout.mode or "-"
        succeeded = rollout.status == "succeeded"
        self.statuses[mode, rollout.status] += 1
        if succeeded and finished.reward is not None:
            self.rewards.setdefault(mode, []).append(finished.reward)
        if not succeeded:
            failure = rollout.failure
            self.failures[failure.error if failure else rollout.status] += 1
        reward = "no reward" if finished.reward is None else f"reward {finished.reward:g}"
        duration = _duration(rollout.start_time, rollout.end_time)
        calls = f", {len(finished.generations)} model calls" if finished.generations else ""
        self.print(
            f"{position} {rollout.rollout_id} ({mode}) {rollout.status}, {reward}{duration}{calls}: "
            f"{_excerpt(rollout.input)}",
            style="green" if succeeded else "red",
        )

    def attempt(self, attempt: Attempt) -> None:
        """Print an attempt and its failure, if any; the traceback is printed once per error."""
        by = f" by {attempt.worker_id}" if attempt.worker_id else ""
        self.print(
            f"  attempt {attempt.sequence_id}{by}: "
            f"{attempt.status}{_duration(attempt.start_time, attempt.end_time)}"
        )
        if (failure := attempt.failure) is None:
            return
        self.print(f"    {failure.kind}: {failure.error}", style="red")
        if failure.trace and failure.error not in self.printed_traces:
            self.print(textwrap.indent(failure.trace.rstrip(), " " * 6), style="dim")
        self.printed_traces.add(failure.error)

    def span(self, span: Span, with_values: bool) -> None:
        """Print a span with the names of its attributes, or with names and values."""
        failed = f" {span.status.status_code}" if span.status.status_code == "ERROR" else ""
        keys = "" if with_values or not span.attributes else f": {', '.join(span.attributes)}"
        self.print(
            f"    #{span.sequence_id} {span.name}{failed}{_duration(span.start_time, span.end_time)}{keys}"
        )
        for key, value in span.attributes.items() if with_values else ():
            self.print(f"      {key} = {_excerpt(value)}")

    def summary(self) -> JsonObject:
        """Return counts, mean rewards of the rollouts that succeeded with one (None if none did), and
        failures by error."""
        rewards = [reward for rewards_of_mode in self.rewards.values() for reward in rewards_of_mode]
        succeeded = sum(count for (_, status), count in self.statuses.items() if status == "succeeded")
        return {
            "rollouts": self.statuses.total(),
            "succeeded": succeeded,
            "unscored": succeeded - len(rewards),
            "mean_reward": statistics.fmean(rewards) if rewards else None,
            "mean_reward_by_mode": {
                mode: statistics.fmean(rewards_of_mode) for mode, rewards_of_mode in self.rewards.items()
            },
            "failures": dict(self.failures.most_common()),
        }

    def print_summary(self, summary: JsonObject) -> None:
        """Log the summary and print it as a table, with hints and errors below."""
        self._log(f"summary: {summary}")
        table = Table("mode", "rollouts", "succeeded", "mean reward", title="baseline")
        for mode in dict.fromkeys(mode for mode, _ in self.statuses):
            count = sum(n for (counted_mode, _), n in self.statuses.items() if counted_mode == mode)
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
            self.print(
                f"{summary['unscored']} succeeded without a reward; return a float from the agent, or call "
                "emit_reward",
                "yellow",
            )
        for error, count in summary["failures"].items():
            self.print(f"{count} failed: {error}", style="red")


def split_samples(
    train: Sequence[object], val: Sequence[object], train_split: float
) -> list[tuple[RolloutMode, object]]:
    """Return the samples with their modes.

    Without `val`, the last samples of `train` run in mode "val"; each mode gets at least one of two or more
    samples.

    Raises:
        DatasetError: there are no samples.
    """
    if not train and not val:
        raise DatasetError(
            "there are no samples to run the agent on; give a train_dataset or a val_dataset with one or more"
        )
    if not val:
        n_train = max(min(round(len(train) * train_split), len(train) - 1), 1)
        train, val = train[:n_train], train[n_train:]
    return [*(("train", task) for task in train), *(("val", task) for task in val)]


def as_list(dataset: object, name: str) -> list[object]:
    """Return all items of a dataset, which needs `__len__` and `__getitem__` only.

    Raises:
        DatasetError: it is something else, a string or a mapping.
    """
    if dataset is None:
        return []
    if isinstance(dataset, str | bytes | dict) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise DatasetError(
            f"{name} is a {type(dataset).__name__}; pass a list (or another sequence) of tasks"
        )
    return [dataset[i] for i in range(len(dataset))]


async def _describe_queue(store: StoreClient) -> str:
    """Return the numbers of running and waiting rollouts in words."""
    counts = await store.statistics()
    waiting = sum(counts.get(f"rollouts_{status}", 0) for status in WAITING)
    running = sum(counts.get(f"rollouts_{status}", 0) for status in ("preparing", "running"))
    hint = "" if running else " (no rollout is running; check that runners are alive)"
    return f"{running} running, {waiting} waiting for a runner{hint}"


def _duration(start: float | None, end: float | None) -> str:
    return "" if start is None or end is None else f", {end - start:.2f} s"


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return (
        text if len(text) <= EXCERPT_CHARACTERS else f"{text[:EXCERPT_CHARACTERS]}… ({len(text)} characters)"
    )
