"""The checker of a run under fault: compares what the agent logged itself with the store, the batches that
the learners received, the metrics and the summary.

It finds three kinds of faults: data that was lost, data that is wrong, and data that was counted or trained
twice.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from chaos_log import BATCHES, LOG

from raylight.semconv import CALL_ID, OUTPUT_MESSAGES
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.trainer.blocking import run_blocking
from raylight.types import Attempt, FinishedRollout

NAME = re.compile(r"(?P<lineage>\w+)-(?P<mode>train|val)-(?P<number>\d+)-")
"""Name of a rollout, made by the Trainer's loop, with the number of its group or of the validated step."""
MAX_MISMATCH = 1e-2
"""Largest difference of log-probs of engine and learner for the same weights."""


class Finding(NamedTuple):
    """A fault in the data of a run."""

    kind: Literal["lost", "wrong", "twice"]
    text: str


@dataclass
class Evidence:
    """All records of a run.

    Attributes:
        log: lines of the agent's own log.
        batches: lines of the driver's log of batches and of loaded training states.
        attempts: all attempts of each rollout, by its id.
        rows: `metrics.jsonl`.
        steps: planned number of steps.
        group: number of training rollouts in each step.
        tasks: number of groups in each step.
        may_fail: number of rollouts that the fault itself may fail.
    """

    log: list[dict[str, Any]]
    batches: list[dict[str, Any]]
    rollouts: list[FinishedRollout]
    attempts: dict[str, list[Attempt]]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None
    steps: int
    group: int
    may_fail: int = 0
    tasks: int = 1
    lineage: str = field(init=False)

    def __post_init__(self) -> None:
        names = [name for line in self.batches for name in line.get("rewards", ())]
        names += [item.rollout.rollout_id for item in self.rollouts]
        last = NAME.match(names[-1]) if names else None
        self.lineage = last["lineage"] if last else ""


def read_evidence(
    folder: Path, run: Path, steps: int, group: int, may_fail: int = 0, tasks: int = 1
) -> Evidence:
    """Read the records of a run.

    Args:
        folder: folder of the test, with the agent's log.
        run: run directory.
    """
    rollouts, attempts = run_blocking(_read_store(run / "store.db"))
    summary = run / "summary.json"
    return Evidence(
        read_lines(folder / LOG),
        read_lines(folder / BATCHES),
        rollouts,
        attempts,
        read_lines(run / "metrics.jsonl"),
        json.loads(summary.read_text()) if summary.exists() else None,
        steps,
        group,
        may_fail,
        tasks,
    )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a line that a kill cut off is left out."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


async def _read_store(file: Path) -> tuple[list[FinishedRollout], dict[str, list[Attempt]]]:
    service = StoreService(file, read_only=True)
    try:
        store = StoreClient(service)
        ids = [rollout.rollout_id for rollout in await store.query_rollouts()]
        attempts = {rollout_id: list(await store.query_attempts(rollout_id)) for rollout_id in ids}
        return await store.collect(ids, with_spans=True), attempts
    finally:
        await service.close()


def check(evidence: Evidence) -> list[Finding]:
    """Return all findings."""
    findings = [
        *_check_complete(evidence),
        *_check_rewards(evidence),
        *_check_answers(evidence),
        *_check_batches(evidence),
        *_check_metrics(evidence),
        *_check_versions(evidence),
        *_check_summary(evidence),
    ]
    return list(dict.fromkeys(findings))


def _current(evidence: Evidence) -> Iterator[tuple[FinishedRollout, str, int]]:
    """Yield the rollouts of the run's last lineage, with mode and step."""
    for item in evidence.rollouts:
        match = NAME.match(item.rollout.rollout_id)
        if match and match["lineage"] == evidence.lineage:
            yield item, match["mode"], _step_of(match, evidence)


def _step_of(match: re.Match[str], evidence: Evidence) -> int:
    """Return the step that a rollout belongs to: groups are trained in order."""
    number = int(match["number"])
    return number // evidence.tasks + 1 if match["mode"] == "train" else number


def _check_complete(evidence: Evidence) -> Iterator[Finding]:
    """Each step has its rollouts, and each of them succeeded with a reward."""
    trained = Counter(step for _, mode, step in _current(evidence) if mode == "train")
    for step in range(1, evidence.steps + 1):
        if trained[step] != evidence.group:
            yield Finding("lost", f"step {step} has {trained[step]} of {evidence.group} rollouts")
    undone = [item for item, _, _ in _current(evidence) if item.rollout.status != "succeeded"]
    for item in undone[evidence.may_fail :]:
        failure = item.rollout.attempt.failure if item.rollout.attempt else None
        reason = f" ({failure.kind}: {failure.error})" if failure else ""
        yield Finding("lost", f"{item.rollout.rollout_id} {item.rollout.status}{reason}")
    known = evidence.attempts.keys()
    for line in evidence.log:
        if line["rollout"] not in known:
            yield Finding("lost", f"{line['rollout']} is in the agent's log and not in the store")


def _check_rewards(evidence: Evidence) -> Iterator[Finding]:
    """The reward of each rollout is the one that the agent returned in the deciding attempt."""
    returned: dict[str, list[float]] = defaultdict(list)
    raised = {line["attempt"] for line in evidence.log if "raised" in line}
    for line in evidence.log:
        if "reward" in line:
            returned[line["attempt"]].append(line["reward"])
    for item in evidence.rollouts:
        name, attempt = item.rollout.rollout_id, item.rollout.attempt
        succeeded = [a for a in evidence.attempts[name] if a.status == "succeeded"]
        if len(succeeded) > 1:
            yield Finding("twice", f"{name} has {len(succeeded)} attempts that succeeded")
        if item.rollout.status != "succeeded" or attempt is None:
            continue
        rewards = returned[attempt.attempt_id]
        if attempt.attempt_id in raised:
            yield Finding("wrong", f"{name} succeeded, and the agent raised in its deciding attempt")
        elif not rewards:
            yield Finding("wrong", f"{name} succeeded with {item.reward}, which the agent never returned")
        elif len(rewards) > 1:
            yield Finding("twice", f"attempt {attempt.attempt_id} of {name} ran {len(rewards)} times")
        elif item.reward is None:
            yield Finding("lost", f"{name} succeeded without the reward {rewards[0]}")
        elif item.reward != rewards[0]:
            yield Finding("wrong", f"{name} has reward {item.reward}, and the agent returned {rewards[0]}")


def _check_answers(evidence: Evidence) -> Iterator[Finding]:
    """The responses of each deciding attempt are those that the agent received, in order."""
    answers = {line["attempt"]: line["answers"] for line in evidence.log if "reward" in line}
    for item in evidence.rollouts:
        name, attempt = item.rollout.rollout_id, item.rollout.attempt
        if item.rollout.status != "succeeded" or attempt is None or attempt.attempt_id not in answers:
            continue
        kept = [call.key.call_id for call in item.generations if call.finish_reason != "aborted"]
        if len(kept) != len(set(kept)):
            yield Finding("twice", f"{name} has a call twice")
        texts = {
            span.attributes[CALL_ID]: json.loads(span.attributes[OUTPUT_MESSAGES])[0].get("content") or ""
            for span in item.spans
            if CALL_ID in span.attributes and OUTPUT_MESSAGES in span.attributes
        }
        stored = [texts.get(call_id) for call_id in kept]
        expected = answers[attempt.attempt_id]
        if len(stored) < len(expected):
            yield Finding("lost", f"{name} has {len(stored)} of {len(expected)} responses")
        elif len(stored) > len(expected):
            yield Finding("twice", f"{name} has {len(stored)} responses for {len(expected)} calls")
        elif stored != expected:
            yield Finding("wrong", f"{name} has responses {stored}, and the agent received {expected}")


def _check_batches(evidence: Evidence) -> Iterator[Finding]:
    """Each rollout is trained once after the training state from which the learners started, always with the
    reward in the store."""
    stored = {item.rollout.rollout_id: item for item in evidence.rollouts}
    step_of: dict[str, int] = {}
    trained, driver = 0, None
    for line in evidence.batches:
        if line["driver"] != driver:
            trained, driver = 0, line["driver"]
        if "loaded" in line:
            trained = line["loaded"]
            continue
        (step,) = {_step_of(match, evidence) for name in line["rewards"] if (match := NAME.match(name))}
        if step <= trained:
            yield Finding("twice", f"step {step} was trained again after step {trained}")
        trained = step
        for name, reward in line["rewards"].items():
            if step_of.setdefault(name, step) != step:
                yield Finding("twice", f"{name} was trained in steps {step_of[name]} and {step}")
            item = stored.get(name)
            if item is None:
                yield Finding("lost", f"{name} was trained and is not in the store")
            elif item.rollout.status == "succeeded" and reward != item.reward:
                yield Finding("wrong", f"{name} was trained with {reward}; its reward is {item.reward}")
            elif item.rollout.status != "succeeded" and reward is not None:
                yield Finding("wrong", f"{name} {item.rollout.status} and was trained with {reward}")


def _check_metrics(evidence: Evidence) -> Iterator[Finding]:
    """Each step is logged once, with increasing versions and the mean of its rewards in the store."""
    yield from _check_sequence([int(row["step"]) for row in evidence.rows], evidence.steps)
    versions = [row["weights/version"] for row in evidence.rows if "weights/version" in row]
    if versions != sorted(set(versions)):
        yield Finding("twice", f"the weight versions do not increase: {versions}")
    rewards: dict[tuple[str, int], list[float]] = defaultdict(list)
    for item, mode, step in _current(evidence):
        if item.reward is not None:
            rewards[mode, step].append(item.reward)
    for row in evidence.rows:
        for mode in ("train", "val"):
            kept = rewards[mode, int(row["step"])]
            logged = row.get(f"{mode}/reward")
            if (
                logged is not None
                and kept
                and not math.isclose(logged, math.fsum(kept) / len(kept), abs_tol=1e-9)
            ):
                yield Finding(
                    "wrong", f"{mode}/reward of step {row['step']:g} is {logged}, not the store's mean"
                )
        if row.get("mismatch/logprob_abs_max", 0.0) > MAX_MISMATCH:
            yield Finding("wrong", f"engine and learner had other weights in step {row['step']:g}")


def _check_sequence(steps: list[int], last: int) -> Iterator[Finding]:
    for step, count in Counter(steps).items():
        if count > 1:
            yield Finding("twice", f"step {step} is {count} times in metrics.jsonl")
    if missing := set(range(last + 1)) - set(steps):
        yield Finding("lost", f"metrics.jsonl lacks the steps {sorted(missing)}")
    if steps != sorted(steps):
        yield Finding("wrong", f"metrics.jsonl is out of order: {steps}")


def _check_versions(evidence: Evidence) -> Iterator[Finding]:
    """Every token of a step was sampled from the weights that the step before it published."""
    after = {-1: 0, 0: 0} | {
        int(row["step"]): int(row["weights/version"]) for row in evidence.rows if "weights/version" in row
    }
    for item, mode, step in _current(evidence):
        expected = after.get(step if mode == "val" else step - 1)
        sampled = {version for call in item.generations for version in call.weight_versions.tolist()}
        if expected is not None and item.rollout.status == "succeeded" and sampled - {expected}:
            name = item.rollout.rollout_id
            yield Finding("wrong", f"{name} was sampled from versions {sorted(sampled)}, not {expected}")


def _check_summary(evidence: Evidence) -> Iterator[Finding]:
    summary = evidence.summary
    if summary is None:
        yield Finding("lost", "there is no summary.json")
        return
    if summary["steps"] != evidence.steps:
        yield Finding("lost", f"the summary has {summary['steps']} of {evidence.steps} steps")
    if summary["rollouts"] != len(evidence.rollouts):
        yield Finding(
            "wrong", f"the summary has {summary['rollouts']} rollouts, the store {len(evidence.rollouts)}"
        )
    for name in ("rollouts_failed", "rollouts_lost"):
        if summary[name] > evidence.may_fail:
            yield Finding("lost", f"the summary has {name}={summary[name]}")


def count_findings(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of findings of each kind."""
    counts = Counter(finding.kind for finding in findings)
    return {kind: counts[kind] for kind in ("lost", "wrong", "twice")}
