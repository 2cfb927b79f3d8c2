"""The reward models of a run's group reward, each a fixed model in separate replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from raylight._utils.aio import task_group
from raylight.engines.reward_model.scorer import ScoredConversation
from raylight.errors import GroupRewardError, RaylightError, RewardModelError, ServingLostError
from raylight.rewards.scoring_model import RewardModelInput, Scorer, ScoringModel
from raylight.trainer.components import Component
from raylight.trainer.components.model_service import ModelService
from raylight.trainer.components.served_model import ServingContext
from raylight.trainer.spec.settings import RewardModelSettings

CONVERSATIONS_PER_REQUEST = 16
"""Conversations of one request, so that a large group is divided among replicas."""
REQUESTS_PER_REPLICA = 16
"""Requests in flight for each replica, which share its forward passes."""


class ServedRewardModel:
    """A reward model with its deployment.

    Args:
        context: the run.
        settings: the model and its engine.
    """

    def __init__(self, context: ServingContext, settings: RewardModelSettings) -> None:
        self._model, self._limit = settings.model, settings.serving.engine.max_model_len
        self.service = ModelService(
            context,
            settings.serving,
            title=f"the reward model {settings.model.name}",
            setting="its timeout_s",
            timeout_s=settings.model.config.timeout_s,
            requests=REQUESTS_PER_REPLICA,
        )
        self._show_stage = context.show_stage
        self._too_long = 0

    async def score(self, conversations: list[RewardModelInput]) -> list[float | None]:
        """Return the score of each conversation, None for one that is too long and dropped.

        Raises:
            RewardModelError: the chat template rejects a conversation, a score is not finite, or the event
                loop is not the run's.
            GroupRewardError: a conversation is too long.
            ServingLostError: no replica answered in time, or the engine failed.
        """
        if not self.service.is_usable_here:
            raise RewardModelError(
                "a reward model scores in the event loop of the run, and a plain function has a thread of "
                "its own; make the group reward `async def`, and await score()"
            )
        truncate = self._model.config.long_conversations == "truncate"

        async def send(part: list[RewardModelInput]) -> list[ScoredConversation]:
            what = f"{len(part)} conversations"
            try:
                found: list[ScoredConversation] = await self.service.ask(
                    "score_conversations", what, part, truncate
                )
            except RaylightError:
                raise
            except Exception as error:  # of the engine, not of a conversation
                raise ServingLostError(
                    f"the reward model {self._model.name} failed: {type(error).__name__}: {error}; see the "
                    "replicas' logs with `ray logs`, and lower max_batch_tokens if memory is short. The run "
                    "can be resumed"
                ) from error
            return found

        size = CONVERSATIONS_PER_REQUEST
        parts = [conversations[start : start + size] for start in range(0, len(conversations), size)]
        async with task_group() as tasks:
            sent = [tasks.create_task(send(part)) for part in parts]
        scored = [one for task in sent for one in task.result()]
        self._note_length([one.length for one in scored])
        return [one.score for one in scored]

    def _note_length(self, lengths: list[int]) -> None:
        """Count the conversations that are too long.

        Raises:
            GroupRewardError: there are some, and they are an error.
        """
        config, too_long = self._model.config, [length for length in lengths if length > self._limit]
        if not too_long:
            return
        treatment = {"drop": "its rollout is not scored", "truncate": "only its last tokens are scored"}
        text = (
            f"a conversation has {max(too_long)} tokens of the reward model {self._model.name}, which takes "
            f"{self._limit}"
        )
        if config.long_conversations == "error":
            raise GroupRewardError(
                f"{text}: set its long_conversations='drop' or 'truncate', raise max_tokens if that is the "
                "limit, lower engine.max_model_len, or choose a model with a longer context. The run can be "
                "resumed"
            )
        if not self._too_long:
            self._show_stage(f"{text}: {treatment[config.long_conversations]}, as for further ones")
        self._too_long += len(too_long)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of repeated requests and of conversations that were too long, so far."""
        counted = {"drop": "dropped", "truncate": "truncated"}.get(self._model.config.long_conversations)
        metrics = {"retries": self.service.retries} | ({counted: self._too_long} if counted else {})
        return {f"reward_model/{self._model.name}/{name}": float(value) for name, value in metrics.items()}


class RewardModels(Component):
    """The reward models of a run, perhaps none. A request finds a lost model."""

    def __init__(self, context: ServingContext, models: Sequence[RewardModelSettings]) -> None:
        self._served = {one.model: ServedRewardModel(context, one) for one in models}

    @property
    def scorers(self) -> Mapping[ScoringModel, Scorer]:
        """The function of each reward model that scores conversations."""
        return {model: served.score for model, served in self._served.items()}

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the coordinators of the replicas, and define their deployments."""
        for served in self._served.values():
            await served.service.open(stack)

    async def start(self) -> None:
        """Start the replicas of each model; see `ModelService.start`."""
        for served in self._served.values():
            await served.service.start()

    async def counts(self) -> dict[str, int]:
        """Return the numbers of repeated requests and of conversations that were too long."""
        return {name.replace("/", "_"): int(value) for name, value in self.metrics().items()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all models, see `ServedRewardModel.metrics`."""
        return {k: v for served in self._served.values() for k, v in served.metrics().items()}
