"""The checker of a run under fault: compares what the agent logged itself with the store, the batches that
the learners received, the metrics and the summary.

It finds three kinds of faults: data that was lost, data that is wrong, and data that was counted or trained
twice.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos_evidence import Evidence, Finding
from chaos_training_checks import check_batches, check_groups, check_ledger, check_versions

from raylight.semconv import CALL_ID, OUTPUT_MESSAGES

MAX_MISMATCH = 1e-2
"""Largest difference of log-probs of engine and learner for the same weights."""


def check(evidence: Evidence) -> list[Finding]:
    """Return all findings."""
    findings = [
        *_check_complete(evidence),
        *_check_rewards(evidence),
        *_check_answers(evidence),
        *check_groups(evidence),
        *check_batches(evidence),
        *check_versions(evidence),
        *check_ledger(evidence),
        *_check_metrics(evidence),
        *_check_summary(evidence),
    ]
    return list(dict.fromkeys(findings))


def _check_complete(evidence: Evidence) -> Iterator[Finding]:
    """Each rollout succeeded, and the store has what the agent ran."""
    undone = [item for item, _, _ in evidence.current() if item.rollout.status != "succeeded"]
    for item in undone[evidence.plan.may_fail :]:
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
        succeeded = [a.worker_id for a in evidence.attempts[name] if a.status == "succeeded"]
        if evidence.plan.cancels:
            succeeded = [worker for worker in succeeded if _driver_of(worker) == _driver_of(succeeded[-1])]
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


def _driver_of(worker: str | None) -> str:
    """Return the name of the driver that a runner belongs to."""
    return (worker or "").split("/")[0]


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
        elif stored != expected and not (evidence.plan.reorders and Counter(stored) == Counter(expected)):
            yield Finding("wrong", f"{name} has responses {stored}, and the agent received {expected}")


def _check_metrics(evidence: Evidence) -> Iterator[Finding]:
    """Each step is logged once, with increasing versions and the mean of its rewards in the store."""
    yield from _check_sequence([int(row["step"]) for row in evidence.rows], evidence.plan.steps)
    versions = [row["weights/version"] for row in evidence.rows if "weights/version" in row]
    if versions != sorted(set(versions)):
        yield Finding("twice", f"the weight versions do not increase: {versions}")
    rewards: dict[tuple[str, int], list[float]] = defaultdict(list)
    for item, mode, number in evidence.current():
        step = evidence.step_of(mode, number)
        if item.reward is not None and step is not None:
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


def _check_summary(evidence: Evidence) -> Iterator[Finding]:
    summary = evidence.summary
    if summary is None:
        yield Finding("lost", "there is no summary.json")
        return
    if summary["steps"] != evidence.plan.steps:
        yield Finding("lost", f"the summary has {summary['steps']} of {evidence.plan.steps} steps")
    if summary["rollouts"] != len(evidence.rollouts):
        yield Finding(
            "wrong", f"the summary has {summary['rollouts']} rollouts, the store {len(evidence.rollouts)}"
        )
    for name in ("rollouts_failed", "rollouts_lost"):
        if summary[name] > evidence.plan.may_fail:
            yield Finding("lost", f"the summary has {name}={summary[name]}")
