"""Rolling the agent out with a prompt, through the store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import NamedResources
from raylight.algorithms.apo.trials import Ending, Evaluation, Trial
from raylight.errors import RolloutsFailedError
from raylight.store.client import StoreClient
from raylight.traces.messages import TraceToMessages
from raylight.traces.rewards import is_reward_span
from raylight.types import EnqueueRolloutRequest, FinishedRollout, RolloutMode, Span

NOTED_SPANS = 30
"""Of a rollout without a call to a model, shown to the critic."""
SHOWN_ATTRIBUTES = 500
"""Characters of a span's."""


class PromptEvaluator:
    """Implements `raylight.algorithms.apo.beam.Evaluate`.

    Args:
        resources: what agents are given beside the prompt.
        name: of the prompt among them.
        datasets: tasks by mode.
        timeout: seconds after which the rollouts of a batch that are not over are cancelled.
        tell: given the rollouts of every batch, to tell of those that failed.
        works: the agent is known to give rewards, so that a prompt is at fault where it gives none.
    """

    def __init__(
        self,
        store: StoreClient,
        resources: NamedResources,
        name: str,
        datasets: dict[RolloutMode, Sequence[Any]],
        timeout: float,
        messages: TraceToMessages,
        tell: Callable[[list[FinishedRollout]], None] = lambda finished: None,
        works: bool = False,
    ) -> None:
        self._store = store
        self._resources = resources
        self._name = name
        self._datasets = datasets
        self._timeout = timeout
        self._messages = messages
        self._tell = tell
        self._works = works
        self._resources_ids: dict[str, str] = {}
        """By the prompt's text."""
        self._offering = asyncio.Lock()

    async def __call__(self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        """Roll every task out once.

        Raises:
            RolloutsFailedError: all were lost to the infrastructure, or none has ever done anything but fail or give no reward.
        """
        resources_id = await self.offer(template)
        asked = [
            EnqueueRolloutRequest(input=self._datasets[mode][i], mode=mode, resources_id=resources_id)
            for i in tasks
        ]
        ids = [rollout.rollout_id for rollout in await self._store.enqueue_many_rollouts(asked)]
        decided = await self._store.wait_for_rollouts(rollout_ids=ids, timeout=self._timeout)
        if len(decided) < len(ids):
            await self._store.cancel_rollouts(ids)
        finished = await self._store.collect(ids, with_spans=True)
        self._tell(finished)
        found = Evaluation([self._trial(item) for item in finished])
        _must_be_there(found)
        self._must_work(found)
        return found

    async def offer(self, template: PromptTemplate) -> str:
        """Store the resources with this prompt, once; returns their id."""
        async with self._offering:  # branches of one parent come at once
            if template.template not in self._resources_ids:
                update = await self._store.add_resources(self._resources | {self._name: template})
                self._resources_ids[template.template] = update.resources_id
            return self._resources_ids[template.template]

    async def settle_on(self, template: PromptTemplate) -> None:
        """Make the resources with this prompt the latest."""
        await self._store.update_resources(
            await self.offer(template), self._resources | {self._name: template}
        )

    def _must_work(self, found: Evaluation) -> None:
        """Raise RolloutsFailedError if the agent fails, or scores nothing, whatever it is asked: then no prompt is at fault."""
        self._works = self._works or any(
            trial.ending == "timed out" or (trial.ending == "succeeded" and trial.reward is not None)
            for trial in found.trials
        )
        if self._works:
            return
        errors = Counter(trial.error for trial in found.trials if trial.ending == "failed")
        if not errors:
            raise RolloutsFailedError(
                f"none of {len(found.trials)} rollouts was scored: the agent returns None; return a float, or a dict of floats"
            )
        error, count = errors.most_common(1)[0]
        raise RolloutsFailedError(
            f"{errors.total()} of the {len(found.trials)} rollouts of the first batch failed and none was scored, {count} of them "
            f"with {error}; Trainer.dev() shows where"
        )

    def _trial(self, item: FinishedRollout) -> Trial:
        failure = item.rollout.attempt.failure if item.rollout.attempt else None
        conversations = self._messages.adapt(item.spans)
        return Trial(
            task=item.rollout.input,
            ending=_ending(item),
            reward=item.reward,
            conversations=conversations,
            notes=()
            if conversations
            else [_note(span) for span in item.spans if not is_reward_span(span)][:NOTED_SPANS],
            error=failure.error if failure else "",
        )


def _ending(item: FinishedRollout) -> Ending:
    if item.rollout.status == "succeeded":
        return "succeeded"
    if item.rollout.status == "cancelled":  # by us, who waited long enough
        return "timed out"
    failure = item.rollout.attempt.failure if item.rollout.attempt else None
    if failure is None or failure.kind in ("infrastructure", "cancelled"):
        return "lost"
    return "timed out" if failure.kind in ("timeout", "unresponsive") else "failed"


def _must_be_there(found: Evaluation) -> None:
    """Raise RolloutsFailedError if all of these rollouts were lost, which says nothing of their prompt."""
    if all(trial.ending == "lost" for trial in found.trials):
        raise RolloutsFailedError(
            f"all {len(found.trials)} rollouts of a batch were lost: {found.trials[0].error or 'their attempts left no reason'}. "
            "fit(resume='auto') goes on with this round"
        )


def _note(span: Span) -> str:
    said = ", ".join(f"{key}={value!r}" for key, value in span.attributes.items())
    return f"- {span.name}: {said[:SHOWN_ATTRIBUTES]}" if said else f"- {span.name}"
