"""Calls that were not sampled from the policy's own distribution, and their treatment in training.

The rule reads what was recorded with each call. Any temperature above 0 is the policy's own distribution, as
the learner divides its logits by it too. So is a constraint that only excludes tokens (a schema, required
tools, allowed or banned words, a minimum length), which has a separate rule: `docs/learning_correction.md`.
Truncation and penalties are trained where the engine recorded the tokens that could have been sampled, with
which the learner replays both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.errors import OffPolicySamplingError
from raylight.types import GREEDY_BELOW, NEVER_SAMPLED_BELOW, Generation, JsonObject

OffPolicySampling = Literal["error", "mask"]
NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Sampling parameter -> values that leave the distribution as it is."""
PENALTIES = frozenset(name for name in NEUTRAL if name.endswith("_penalty"))


def off_policy_parameters(sampling: Mapping[str, Any]) -> JsonObject:
    """Return the recorded sampling parameters that change the policy's distribution; empty for none.

    Temperature 0 is one of them: it takes the most probable token. A bias that bans tokens, or all others, is
    a constraint.
    """
    changed = {name: sampling[name] for name in NEUTRAL if sampling.get(name) not in (None, *NEUTRAL[name])}
    if sampling.get("temperature", 1.0) < GREEDY_BELOW:
        changed["temperature"] = sampling["temperature"]
    bias = sampling.get("logit_bias") or {}
    values = bias.values() if isinstance(bias, Mapping) else [value for _, value in bias]
    if any(0 < abs(value) < -NEVER_SAMPLED_BELOW for value in values):
        changed["logit_bias"] = bias
    return changed


def is_replayable(sampling: Mapping[str, object]) -> bool:
    """Return True if sampling parameters truncate or penalise, and a learner that knows which tokens could
    have been sampled can compute the distribution again."""
    changed = off_policy_parameters(sampling).keys()
    # a repetition penalty scales what a ban has added to a logit
    is_known = not (PENALTIES & changed and sampling.get("logit_bias"))
    return bool(changed) and changed <= NEUTRAL.keys() and is_known


def untrainable_parameters(call: Generation, replays: bool = True) -> JsonObject:
    """Return the sampling parameters of a call for which its tokens cannot be trained; empty for none.

    Args:
        replays: the learner replays truncation and penalties that the engine recorded.
    """
    return {} if replays and call.is_replayed else off_policy_parameters(call.sampling)


@dataclass
class OffPolicyCalls:
    """Counts the calls of a batch that were sampled off-policy, or raises an error for the first one.

    Args:
        treatment: "error", or "mask" to leave the tokens of such calls out of the loss.
        replays: the learner replays truncation and penalties.
    """

    treatment: OffPolicySampling
    replays: bool = True
    calls: int = 0
    parameters: Counter[str] = field(default_factory=Counter)
    """Number of such calls for each agent, model and parameter, as `describe` writes them."""

    def judge(self, generations: Iterable[Generation]) -> frozenset[str]:
        """Return the ids of the calls to mask.

        Raises:
            OffPolicySamplingError: a call was sampled off-policy, and the treatment is "error".
        """
        masked = set()
        for call in generations:
            if changed := untrainable_parameters(call, self.replays):
                if self.treatment == "error":
                    raise OffPolicySamplingError(_error(call, changed))
                masked.add(call.key.call_id)
                self.parameters[describe(call, changed)] += 1
        self.calls += len(masked)
        return frozenset(masked)


def count_repeated_seeds(groups: Mapping[str, Iterable[Iterable[Generation]]]) -> int:
    """Return the number of rollouts whose calls have a seed that another rollout of the group has too.

    Where their prompts are equal, so are their responses, which then have nothing to compare.

    Args:
        groups: the calls of each rollout, by group.
    """
    repeated = 0
    for rollouts in groups.values():
        seeds = [
            {seed for call in calls if (seed := call.sampling.get("seed")) is not None} for calls in rollouts
        ]
        uses = Counter(seed for used in seeds for seed in used)
        repeated += sum(any(uses[seed] > 1 for seed in used) for used in seeds)
    return repeated


def describe(call: Generation, changed: Mapping[str, object]) -> str:
    """Return a phrase with agent, model and parameters of a call."""
    caller = "an agent" if call.agent is None else f"agent {call.agent!r}"
    return f"{caller} sampled from model {call.model!r} with {_listed(changed)}"


def _listed(changed: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in changed.items())


def _error(call: Generation, changed: Mapping[str, object]) -> str:
    return (
        f"{describe(call, changed)} (call {call.key.call_id} of rollout {call.key.rollout_id}): this is not "
        "the distribution of the policy, and the learner cannot replay it, so that training on it would be "
        "biased. Remove "
        f"{', '.join(changed)} from the agent's requests of training rollouts"
        f"{' and sample at a temperature above 0' if 'temperature' in changed else ''}; or set "
        "override_sampling=True, with which raylight sets the sampling of training rollouts; or "
        'off_policy_sampling="mask", which leaves such calls out of the loss'
    )
