"""Names of spans and attributes. The keys are agent-lightning 0.3's, so that traces stay interchangeable."""

ANNOTATION = "agentlightning.annotation"
"""Name of a span that carries a reward."""

REWARD_PREFIX = "agentlightning.reward"
"""Attributes `agentlightning.reward.N.name` and `agentlightning.reward.N.value`; index 0 is the primary reward."""


def reward_attributes(rewards: dict[str, float]) -> dict[str, str | float]:
    """Flatten named rewards into span attributes, the primary reward first."""
    flat: dict[str, str | float] = {}
    for index, (name, value) in enumerate(rewards.items()):
        flat[f"{REWARD_PREFIX}.{index}.name"] = name
        flat[f"{REWARD_PREFIX}.{index}.value"] = value
    return flat
