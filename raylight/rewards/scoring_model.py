"""Reward models: models with a scalar head that score the last conversation of each rollout.

The model computes in separate Ray Serve replicas, which a run starts for each reward model that its
group reward names in `reward_models`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import Field

from raylight._utils.bounds import MAX_COUNT
from raylight.config import ScoringConfig
from raylight.errors import ConfigError, RewardModelError
from raylight.rewards.group import GroupReward, GroupRollout
from raylight.traces.messages import Message
from raylight.types import JsonObject


class RewardModelConfig(ScoringConfig):
    """A reward model in separate engines: `AutoModelForSequenceClassification` with one label, as TRL's
    RewardTrainer saves it.

    Args:
        model: folder of a Hugging Face model with a chat template, or its name in the local cache.
    """

    max_tokens: int | None = Field(default=None, ge=8, le=MAX_COUNT)
    """Longest conversation, in tokens of the reward model; the model's own limit applies if it is lower.
    None: that limit."""
    long_conversations: Literal["error", "drop", "truncate"] = "error"
    """Treatment of longer conversations: end the run with an error, leave their rollouts without a reward, or
    score their last tokens. The metrics count dropped and truncated conversations."""
    max_batch_tokens: int = Field(default=16_384, ge=1, le=MAX_COUNT)
    """Tokens of one forward pass, padding included; a longer conversation is a separate pass."""


class RewardModelInput(NamedTuple):
    """A conversation that a reward model scores."""

    messages: Sequence[Message]
    """Messages in OpenAI's shape, the answer last."""
    tools: list[JsonObject] | None = None
    """Tools that the agent offered, which a chat template may show."""


Scorer: TypeAlias = Callable[[list[RewardModelInput]], Awaitable[list[float | None]]]
"""Function from conversations to their scores, None for one that was dropped."""

_SCORERS: contextvars.ContextVar[Mapping[ScoringModel, Scorer] | None] = contextvars.ContextVar(
    "raylight_scorers", default=None
)
"""Reward models that the current run serves."""


class ScoringModel:
    """Group reward by `rl.rewards.reward_model`; each rollout gets the reward `name`.

    A rollout without a call of the model is not scored.
    """

    def __init__(self, config: RewardModelConfig, name: str) -> None:
        self.config, self.name = config, name
        self.identity = [config.model, config.max_tokens, config.long_conversations, name]

    @property
    def reward_models(self) -> tuple[ScoringModel, ...]:
        """The reward models that a run serves for this group reward."""
        return (self,)

    async def __call__(self, group: list[GroupRollout]) -> list[dict[str, float] | None]:
        called = [rollout for rollout in group if rollout.messages]
        scores = await self.score([RewardModelInput(rollout.messages, rollout.tools) for rollout in called])
        found = dict(zip(map(id, called), scores, strict=True))
        return [
            None if (score := found.get(id(rollout))) is None else {self.name: score} for rollout in group
        ]

    async def score(
        self, conversations: Sequence[RewardModelInput | Sequence[Message]]
    ) -> list[float | None]:
        """Return the score of each conversation, None for one that is too long and dropped.

        Args:
            conversations: messages in OpenAI's shape, or `RewardModelInput` to show tools too.

        Raises:
            RewardModelError: no run serves this model now, the event loop is not the run's, the chat template
                rejects a conversation, or a score is not finite.
            GroupRewardError: a conversation is too long.
        """
        scorers = _SCORERS.get() or {}
        if self not in scorers:
            raise RewardModelError(
                f"the reward model {self.config.model!r} is not served: a run serves those that its group "
                "reward names. Pass it to Trainer(group_reward=...) or RewardSum, or set the attribute "
                "`reward_models` of your own group reward to a list of the models that it calls"
            )
        shown = [one if isinstance(one, RewardModelInput) else RewardModelInput(one) for one in conversations]
        return await scorers[self](shown) if shown else []


def reward_model(model: str, *, name: str = "reward_model", **settings: Any) -> ScoringModel:
    """Return a group reward for `Trainer(group_reward=...)`: a model with a scalar head scores each rollout.

    The run serves the model in separate Ray Serve replicas.

    Args:
        model: folder of a Hugging Face model with a chat template, or its name in the local cache.
        name: name of the reward.
        settings: further settings of `RewardModelConfig`, such as `replicas=2` or `num_gpus=1`.

    Raises:
        ConfigError: a setting is unknown or wrong.
    """
    if not name:
        raise ConfigError("the name of a reward model is empty; give one, under which its reward is shown")
    return ScoringModel(RewardModelConfig(model=str(model), **settings), name)


def find_reward_models(function: GroupReward | None) -> tuple[ScoringModel, ...]:
    """Return the reward models that a group reward names, each once.

    Raises:
        ConfigError: its attribute `reward_models` has something else.
    """
    given = getattr(function, "reward_models", ())
    named = tuple(given) if isinstance(given, Iterable) else (given,)
    for one in named:
        if not isinstance(one, ScoringModel):
            raise ConfigError(
                f"reward_models of the group reward has {one!r:.80}; give a list of "
                "rl.rewards.reward_model(...)"
            )
    return tuple(dict.fromkeys(named))


@contextmanager
def scoring_by(scorers: Mapping[ScoringModel, Scorer]) -> Iterator[None]:
    """Have reward models score by these functions within the block and in its tasks."""
    token = _SCORERS.set(scorers)
    try:
        yield
    finally:
        _SCORERS.reset(token)
