"""The reward that the tests of a Harbor task write: /logs/verifier/reward.json or reward.txt."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from raylight.errors import RewardError
from raylight.harbor.task_folder import PRIMARY


def read_json_reward(content: bytes) -> float | dict[str, float]:
    """Return the number, or the numbers by name with the primary one first.

    Raises:
        RewardError: it is no JSON, empty, or has a value that is no finite number.
    """
    try:
        value = json.loads(content)
    except ValueError as error:
        raise RewardError(
            f"reward.json of the tests is not JSON ({error}); it has {content[:80]!r}"
        ) from None
    if not isinstance(value, dict):
        return _number(value, "reward.json")
    if not value:
        raise RewardError(
            'reward.json of the tests is empty; write a number, or an object such as {"reward": 1}'
        )
    names = sorted(value, key=lambda name: name != PRIMARY)  # the order of the file otherwise
    return {name: _number(value[name], f"{name} in reward.json") for name in names}


def read_text_reward(content: bytes) -> float:
    """Return the number of reward.txt.

    Raises:
        RewardError: it is no finite number.
    """
    try:
        value = float(content.decode())
    except ValueError:
        raise RewardError(f"reward.txt of the tests has {content[:80]!r}; write a number") from None
    return _number(value, "reward.txt")


def mean_rewards(rewards: Sequence[float | dict[str, float]]) -> float | dict[str, float]:
    """Return the mean rewards of several steps, by name if one has names. A missing one counts as 0."""
    if not any(isinstance(reward, dict) for reward in rewards):
        return math.fsum(rewards) / len(rewards)  # type: ignore[arg-type]
    named = [reward if isinstance(reward, dict) else {PRIMARY: reward} for reward in rewards]
    names = sorted(dict.fromkeys(name for step in named for name in step), key=lambda name: name != PRIMARY)
    return {name: math.fsum(step.get(name, 0.0) for step in named) / len(named) for name in names}


def _number(value: object, place: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"the reward of the tests, {place}, is {value!r:.80}; write a finite number")
    return float(value)
