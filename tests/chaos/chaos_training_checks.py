"""Checks of what the training steps took: their groups, the age of their tokens, and the tokens' ledger."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from chaos_evidence import Evidence, Finding, group_of

SUMS = ("generated", "trained", "masked", "dropped", "failed")
"""Sums of the ledger that never fall."""


def check_groups(evidence: Evidence) -> Iterator[Finding]:
    """Each step took as many groups as planned, each group was taken once, and no finished rollout was
    sampled again."""
    plan = evidence.plan
    for step in range(1, plan.steps + 1):
        trained = evidence.recorded[step].trained if step in evidence.recorded else ()
        if len(trained) != plan.tasks:
            yield Finding("lost", f"step {step} took {len(trained)} of {plan.tasks} groups")
    taken = Counter(group for step in evidence.recorded.values() for group in (*step.trained, *step.dropped))
    for group, times in taken.items():
        if times > 1:
            yield Finding("twice", f"group {group} was taken {times} times")
    sampled = Counter(number for _, mode, number in evidence.current() if mode == "train")
    for group in sorted(sampled.keys() | taken.keys()):
        if sampled[group] != plan.samples:
            yield Finding("lost", f"group {group} has {sampled[group]} of {plan.samples} rollouts")
        if group not in taken:
            yield Finding("lost", f"group {group} was sampled, and no step took it")
    yield from _check_not_sampled_again(evidence)


def _check_not_sampled_again(evidence: Evidence) -> Iterator[Finding]:
    """No agent ran for a rollout after an attempt of it had succeeded. One that an outage of serving made
    doubtful has failed since."""
    sound = {a.attempt_id for made in evidence.attempts.values() for a in made if a.status == "succeeded"}
    ended = {line["rollout"]: line["at"] for line in evidence.log if line["attempt"] in sound}
    for line in evidence.log:
        if line["began"] > ended.get(line["rollout"], math.inf):
            yield Finding("twice", f"{line['rollout']} was sampled again after it had succeeded")


def _step_of(batch: dict[str, Any], evidence: Evidence) -> int:
    """Return the step that has the first group of a batch; 0 if none has."""
    return evidence.step_of_group.get(group_of(next(iter(batch["rewards"]))), 0)


def check_batches(evidence: Evidence) -> Iterator[Finding]:
    """Each batch has the groups that the store has recorded for its step, with the rewards in the store; it
    has both whenever the step is taken. Each step is trained once after the training state from which the
    learners started."""
    rewards_of: dict[int, dict[str, float | None]] = {}
    stored = {item.rollout.rollout_id: item for item in evidence.rollouts}
    trained, driver = 0, None
    for line in evidence.batches:
        if line["driver"] != driver:
            trained, driver = 0, line["driver"]
        trained = line.get("loaded", trained)
        if "rewards" not in line:
            continue
        groups, step = {group_of(name) for name in line["rewards"]}, _step_of(line, evidence)
        if groups != set(evidence.recorded[step].trained if step else ()):
            yield Finding("wrong", f"a batch has the groups {sorted(groups)}, which are not those of a step")
            continue
        if step <= trained:
            yield Finding("twice", f"step {step} was trained again after step {trained}")
        trained = step
        if rewards_of.setdefault(step, line["rewards"]) != line["rewards"]:
            yield Finding("wrong", f"step {step} had other rewards when it was taken again")
        for name, reward in line["rewards"].items():
            item = stored.get(name)
            if item is None:
                yield Finding("lost", f"{name} was trained and is not in the store")
            elif item.rollout.status == "succeeded" and reward != item.reward:
                yield Finding("wrong", f"{name} was trained with {reward}; its reward is {item.reward}")
            elif item.rollout.status != "succeeded" and reward is not None:
                yield Finding("wrong", f"{name} {item.rollout.status} and was trained with {reward}")


def check_versions(evidence: Evidence) -> Iterator[Finding]:
    """Every evaluation uses the weights after its step. No token is newer than the weights that it updates,
    and no trained token more than `max_staleness` versions older."""
    plan, items = evidence.plan, {item.rollout.rollout_id: item for item in evidence.rollouts}
    after = {-1: 0, 0: 0} | {
        int(row["step"]): int(row["weights/version"]) for row in evidence.rows if "weights/version" in row
    }
    sampled = {
        name: sorted({version for call in item.generations for version in call.weight_versions.tolist()})
        for name, item in items.items()
        if item.rollout.status == "succeeded"
    }
    for item, mode, step in evidence.current():
        versions = sampled.get(item.rollout.rollout_id)
        if mode == "val" and versions and step in after and versions != [after[step]]:
            name = item.rollout.rollout_id
            yield Finding("wrong", f"{name} was sampled from versions {versions}, not {after[step]}")
    for line in evidence.batches:
        if "rewards" not in line:
            continue
        step, version, oldest = _step_of(line, evidence), line["version"], line["oldest"]
        if (expected := after.get(step - 1)) not in (None, version):
            yield Finding("wrong", f"step {step} updated version {version}, not {expected}")
        if oldest is not None and oldest < version - plan.max_staleness:
            yield Finding("wrong", f"step {step} trained tokens of {oldest} at version {version}")
        lowest = 0 if plan.stale == "mask" else version - plan.max_staleness
        for name in line["rewards"]:
            versions = sampled.get(name)
            if versions and not lowest <= versions[0] <= versions[-1] <= version:
                text = f"{name} was sampled from versions {versions} and trained at {version}"
                yield Finding("wrong", text)


def check_ledger(evidence: Evidence) -> Iterator[Finding]:
    """The ledger closes in every row, its sums never fall, and at the end they equal the store's."""
    before = dict.fromkeys(SUMS, 0)
    for row in evidence.rows:
        if "ledger/generated" not in row:
            yield Finding("lost", f"step {row['step']:g} has no ledger")
            continue
        if row["ledger/unaccounted"]:
            yield Finding("lost", f"{row['ledger/unaccounted']:g} tokens of step {row['step']:g} unaccounted")
        for name in SUMS:
            if row[f"ledger/{name}"] < before[name]:
                yield Finding("lost", f"ledger/{name} falls in step {row['step']:g}")
            before[name] = int(row[f"ledger/{name}"])
    generated = evidence.tokens.sampled + evidence.tokens.late
    if evidence.rows and before["generated"] != generated:
        yield Finding(
            "lost", f"the ledger has {before['generated']} tokens, and the store counts {generated}"
        )
    taken = {"trained": 0, "dropped": 0}
    for item, mode, group in evidence.current():
        if mode == "train" and item.rollout.status == "succeeded":
            kind = "trained" if evidence.step_of(mode, group) is not None else "dropped"
            taken[kind] += sum(len(call.output_ids) for call in item.generations)
    if before["trained"] + before["masked"] != taken["trained"] or before["dropped"] != taken["dropped"]:
        yield Finding("wrong", f"the ledger has {before}, and the calls in the store have {taken} tokens")
