"""Evaluation of prompts by rollouts of the agent, through the store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raylight.agent.emit import get_message_value
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import NamedResources
from raylight.algorithms.apo.trials import Evaluation, Outcome, Trial
from raylight.errors import RolloutsFailedError
from raylight.store.client import StoreClient
from raylight.traces.messages import TraceToMessages
from raylight.traces.reward_spans import is_reward_span
from raylight.types import EnqueueRolloutRequest, FinishedRollout, RolloutMode, Span

MAX_SPANS = 30
"""Spans per rollout without a model call that the critic reads."""
MAX_SPAN_CHARACTERS = 500
"""Characters of a span's attributes that the critic reads."""


@dataclass(eq=False)
class PromptEvaluator:
    """Implementation of `raylight.algorithms.apo.beam.EvaluateFunction`.

    Args:
        resources: resources of agents besides the prompt.
        name: name of the prompt among the resources.
        datasets: tasks by mode.
        timeout: seconds after which the undecided rollouts of a batch are cancelled.
        messages: adapter that converts spans into conversations.
        report_failures: called with the rollouts of every batch.
        agent_works: True if the agent has returned rewards before, so that a prompt without rewards does not
            end the search.
    """

    store: StoreClient
    resources: NamedResources
    name: str
    datasets: dict[RolloutMode, Sequence[object]]
    timeout: float
    messages: TraceToMessages
    report_failures: Callable[[list[FinishedRollout]], None] = lambda finished: None
    agent_works: bool = False
    _resources_ids: dict[str, str] = field(default_factory=dict, init=False)
    """Text of a prompt -> id of the resources that contain it."""
    _storing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def __call__(self, template: PromptTemplate, tasks: Sequence[int], mode: RolloutMode) -> Evaluation:
        """Roll every task out once.

        Raises:
            RolloutsFailedError: infrastructure failures lost all rollouts, or no rollout so far has returned
                a reward.
        """
        resources_id = await self.store_prompt(template)
        requests = [
            EnqueueRolloutRequest(input=self.datasets[mode][i], mode=mode, resources_id=resources_id)
            for i in tasks
        ]
        ids = [rollout.rollout_id for rollout in await self.store.enqueue_many_rollouts(requests)]
        decided = await self.store.wait_until_decided(rollout_ids=ids, timeout=self.timeout)
        if len(decided) < len(ids):
            await self.store.cancel_rollouts(ids)
        finished = await self.store.collect(ids, with_spans=True, with_span_tokens=False)
        self.report_failures(finished)
        evaluation = Evaluation([self._trial(item) for item in finished])
        _check_not_all_lost(evaluation)
        self._check_agent_works(evaluation)
        return evaluation

    async def store_prompt(self, template: PromptTemplate) -> str:
        """Store the resources with this prompt, once, and return their id."""
        async with self._storing:  # branches of one parent run concurrently
            if template.template not in self._resources_ids:
                update = await self.store.add_resources(self.resources | {self.name: template})
                self._resources_ids[template.template] = update.resources_id
            return self._resources_ids[template.template]

    async def make_latest(self, template: PromptTemplate) -> None:
        """Make the resources with this prompt the latest in the store."""
        await self.store.update_resources(
            await self.store_prompt(template), self.resources | {self.name: template}
        )

    def _check_agent_works(self, evaluation: Evaluation) -> None:
        """Raise RolloutsFailedError if the agent has never returned a reward: then the prompt is not the
        cause."""
        self.agent_works = self.agent_works or any(
            trial.outcome == "timed out" or (trial.outcome == "succeeded" and trial.reward is not None)
            for trial in evaluation.trials
        )
        if self.agent_works:
            return
        errors = Counter(trial.error for trial in evaluation.trials if trial.outcome == "failed")
        if not errors:
            raise RolloutsFailedError(
                f"none of the {len(evaluation.trials)} rollouts has a reward: the agent returns None; return "
                "a float, or a dict of floats"
            )
        error, count = errors.most_common(1)[0]
        raise RolloutsFailedError(
            f"{errors.total()} of the {len(evaluation.trials)} rollouts of the first batch failed and none "
            f"has a reward, {count} of them with {error}; run Trainer.dev() to see the traceback"
        )

    def _trial(self, item: FinishedRollout) -> Trial:
        failure = item.rollout.failure
        conversations = self.messages.adapt(item.spans)
        spans = [] if conversations else [span for span in item.spans if not is_reward_span(span)]
        return Trial(
            task=item.rollout.input,
            outcome=_outcome(item),
            reward=item.reward,
            conversations=conversations,
            notes=[_describe_span(span) for span in spans[:MAX_SPANS]],
            error=failure.error if failure else "",
            feedback=[text for span in item.spans if (text := get_message_value(span)) is not None],
        )


def _outcome(item: FinishedRollout) -> Outcome:
    if item.rollout.status == "succeeded":
        return "succeeded"
    if item.rollout.status == "cancelled":  # by the evaluator, after its timeout
        return "timed out"
    failure = item.rollout.failure
    if failure is None or failure.kind in ("infrastructure", "cancelled"):
        return "lost"
    return "timed out" if failure.kind in ("timeout", "unresponsive") else "failed"


def _check_not_all_lost(evaluation: Evaluation) -> None:
    """Raise RolloutsFailedError if all rollouts were lost, which leaves the prompt without a score."""
    if all(trial.outcome == "lost" for trial in evaluation.trials):
        raise RolloutsFailedError(
            f"all {len(evaluation.trials)} rollouts of a batch were lost to infrastructure failures, the "
            f"first with: {evaluation.trials[0].error or 'no error recorded'}. fit(resume='auto') continues "
            "with this round"
        )


def _describe_span(span: Span) -> str:
    attributes = ", ".join(f"{key}={value!r}" for key, value in span.attributes.items())
    return f"- {span.name}: {attributes[:MAX_SPAN_CHARACTERS]}" if attributes else f"- {span.name}"
