"""Trajectories from generations: a tree over token prefixes.

A call whose prompt continues the tokens of an earlier call (its prompt and its whole output) extends that conversation; what lies
between is an observation and is masked. A call that continues nothing begins a branch of its own. When two calls continue the same
conversation, the first extends it and the other becomes a branch in which the shared past is context.

Laws: every sampled response is trained exactly once; the tokens of a trajectory equal `prompt_ids + output_ids` of its last call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raylight.types import Generation, Trajectory


@dataclass
class Branch:
    """A conversation that grows at its end."""

    tokens: list[int]
    calls: list[Generation] = field(default_factory=list)

    def continued_by(self, call: Generation) -> bool:
        """Whether the call goes on where this ends, at the same temperature (a trajectory has one)."""
        if call.temperature != self.calls[0].temperature:
            return False
        return len(call.prompt_ids) >= len(self.tokens) and call.prompt_ids[: len(self.tokens)] == self.tokens

    def extend(self, call: Generation) -> None:
        self.calls.append(call)
        self.tokens = call.prompt_ids + call.output_ids


def build_trajectories(generations: list[Generation]) -> list[Trajectory]:
    """Trajectories of one attempt.

    Args:
        generations: of one attempt, in the order in which the calls began. Calls that sampled nothing or were aborted before
            their first token are left out.
    """
    branches: list[Branch] = []
    for call in generations:
        if not call.output_ids:
            continue
        fitting = [branch for branch in branches if branch.continued_by(call)]
        if fitting:
            max(fitting, key=lambda branch: len(branch.tokens)).extend(call)
        else:
            branch = Branch([])
            branch.extend(call)
            branches.append(branch)
    return [_trajectory(branch) for branch in branches]


def _trajectory(branch: Branch) -> Trajectory:
    """Lay a branch's calls out, one entry per token."""
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for call in branch.calls:
        gap = len(call.prompt_ids) - len(mask)  # the first prompt, or an observation between two calls
        mask += [0] * gap + [1] * len(call.output_ids)
        logprobs += [0.0] * gap + call.logprobs
        versions += [-1] * gap + call.weight_versions
    return Trajectory(branch.calls[0].key.rollout_id, branch.tokens, mask, logprobs, versions, branch.calls[0].temperature)
