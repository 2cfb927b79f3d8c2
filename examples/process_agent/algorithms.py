"""Two algorithms of the example: one evaluates the agent, one rewrites its prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError

import raylight as rl
from examples.process_agent.design_reward import Grade, grade, tool_calls
from examples.process_agent.flowsheets.local import SimulatorUnavailableError
from raylight.errors import ConfigError, DatasetError, PromptError, RolloutsFailedError
from raylight.types import FinishedRollout, RolloutMode

logger = logging.getLogger("process_agent")
PROMPT = "system_prompt"
"""Name of the resource with the prompt."""
TIMEOUT_S = 900.0
"""Time limit of a rollout, in seconds."""


async def roll_out(
    store: rl.StoreClient, tasks: Sequence[Any], mode: RolloutMode, resources_id: str | None
) -> list[FinishedRollout]:
    """Roll every task out once, and wait for all rollouts.

    Raises:
        RolloutsFailedError: the simulator or the cluster lost some, so that a mean would not measure the
            agent.
    """
    config = rl.RolloutConfig(timeout_seconds=TIMEOUT_S)
    requests = [
        rl.EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id, config=config)
        for task in tasks
    ]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    await store.wait_for_rollouts(rollout_ids=ids)
    finished = await store.collect(ids, with_spans=True)
    for item in finished:
        logger.info("%s", describe(item))
    lost = [item for item in finished if is_lost(item)]
    if lost:
        raise RolloutsFailedError(
            f"{len(lost)} of {len(finished)} rollouts were lost through no fault of the agent: "
            f"{errors_of(lost)}. Start again when that is mended"
        )
    return finished


def must_score(finished: list[FinishedRollout]) -> list[FinishedRollout]:
    """Raise RolloutsFailedError if no rollout has a reward."""
    if all(item.reward is None for item in finished):
        raise RolloutsFailedError(f"none of {len(finished)} rollouts was scored: {errors_of(finished)}")
    return finished


def is_lost(item: FinishedRollout) -> bool:
    """True if the simulator or the cluster failed a rollout."""
    attempt = item.rollout.attempt
    failure = attempt.failure if attempt else None
    by_simulator = failure is not None and failure.error.startswith(SimulatorUnavailableError.__name__)
    return by_simulator or (failure is not None and failure.kind in ("infrastructure", "cancelled"))


def errors_of(finished: Sequence[FinishedRollout]) -> str:
    """Return the different errors of rollouts, in one line."""
    return "; ".join(sorted({failure for item in finished if (failure := failure_of(item))})) or "no reward"


def failure_of(item: FinishedRollout) -> str | None:
    """Return the error of a rollout; None if it succeeded."""
    attempt = item.rollout.attempt
    return attempt.failure.error if attempt and attempt.failure else None


def describe(item: FinishedRollout) -> str:
    """Describe a rollout in one line: task, rewards, tool calls."""
    task, title = item.rollout.input, f"{item.rollout.mode} {item.rollout.input['id']}"
    if item.reward is None:
        return f"{title}: {item.rollout.status}, {failure_of(item) or 'no reward'}"
    found = grade(task, item.spans)
    return (
        f"{title}: reward {item.reward:.3f} (completion {found.completion:.2f}, efficiency "
        f"{found.efficiency:.2f}, quality {found.quality:.2f}), {found.calls} calls, {found.failed} failed"
    )


def mean_reward(finished: Sequence[FinishedRollout]) -> float:
    """Return the mean over the tasks; a rollout that failed with an error of the agent counts as 0."""
    return statistics.fmean(item.reward or 0.0 for item in finished)


def by_difficulty(finished: Sequence[FinishedRollout]) -> dict[str, float]:
    """Return the mean reward of each difficulty, and of all tasks."""
    groups: dict[str, list[FinishedRollout]] = {}
    for item in finished:
        groups.setdefault(item.rollout.input["difficulty"], []).append(item)
    return {name: mean_reward(items) for name, items in groups.items()} | {"all": mean_reward(finished)}


class DesignBaseline(rl.FastAlgorithm):
    """Rolls every task out once and reports the rewards, without training."""

    def __init__(self) -> None:
        self.scores: dict[str, dict[str, float]] = {}
        """Mean rewards by mode and difficulty."""
        self.finished: list[FinishedRollout] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Evaluate the agent.

        Raises:
            DatasetError: there are no tasks.
            RolloutsFailedError: some rollouts were lost, or none was scored.
        """
        if not train_dataset and not val_dataset:
            raise DatasetError("there are no tasks to roll out; give a train_dataset or a val_dataset")
        for mode, tasks in (("train", train_dataset), ("val", val_dataset)):
            if tasks:
                found = must_score(await roll_out(self.get_store(), tasks, mode, None))  # type: ignore[arg-type]
                self.finished += found
                self.scores[mode] = by_difficulty(found)
                logger.info("%s: mean rewards %s", mode, shown(self.scores[mode]))


@dataclass(frozen=True)
class Candidate:
    """A prompt that was tried.

    Attributes:
        number, parent: indexes in the history; the first prompt has no parent.
        score: mean reward on the scoring tasks; None for a rejected prompt.
        refused: reason of the rejection.
    """

    number: int
    parent: int | None
    text: str
    score: float | None = None
    refused: str | None = None
    finished: list[FinishedRollout] = field(default_factory=list, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The candidate as JSON, for a file."""
        return {
            "number": self.number,
            "parent": self.parent,
            "score": self.score,
            "refused": self.refused,
            "text": self.text,
        }


class PromptOptimiser(rl.Algorithm):
    """Rewrites the agent's system prompt from its failures, and keeps a rewrite only if it scores better.

    In each round the best prompt is rolled out on a batch of training tasks. A model reads its worst rollouts
    and writes new prompts, and those that keep the placeholders are scored on the scoring tasks. The best
    prompt so far is kept; of equals, the older one. The scoring tasks are the validation tasks, or without
    them the training tasks.

    Args:
        client, model: endpoint and name of the model that writes prompts.
        rounds: number of rounds.
        candidates: new prompts per round.
        batch: training tasks per round, taken in turn.
        shown: number of the worst rollouts of a batch that the writer reads.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        *,
        rounds: int = 2,
        candidates: int = 2,
        batch: int = 4,
        shown: int = 3,
    ) -> None:
        self._client = client
        self._model = model
        self._rounds, self._candidates, self._batch, self._shown = rounds, candidates, batch, shown
        self.history: list[Candidate] = []
        self._place = 0

    @property
    def best(self) -> Candidate:
        """Prompt with the highest score; of equals, the oldest."""
        return max((one for one in self.history if one.score is not None), key=lambda one: one.score or 0.0)

    def resolved(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "rounds": self._rounds,
            "candidates": self._candidates,
            "batch": self._batch,
            "shown": self._shown,
        }

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Optimise the prompt.

        Raises:
            ConfigError: the resources have no prompt.
            DatasetError: there are no training tasks.
            RolloutsFailedError: some rollouts were lost, or none with the first prompt has a reward.
            ConfigError: the model that writes prompts does not respond.
        """
        if not train_dataset:
            raise DatasetError("prompt optimisation learns from training tasks; give a train_dataset")
        first = (self.get_initial_resources() or {}).get(PROMPT)
        if not isinstance(first, rl.PromptTemplate):
            raise ConfigError(
                f"there is no prompt to optimise; give a PromptTemplate as the resource {PROMPT!r}"
            )
        tasks, scoring = list(train_dataset), list(val_dataset or train_dataset)
        await self._try([(first.template, None)], scoring, first.placeholders())
        for number in range(1, self._rounds + 1):
            best = self.best
            logger.info(
                "round %d/%d: the best prompt is number %d with %.3f",
                number,
                self._rounds,
                best.number,
                best.score,
            )
            batch = [tasks[(self._place + i) % len(tasks)] for i in range(min(self._batch, len(tasks)))]
            self._place += len(batch)
            lessons = await roll_out(self.get_store(), batch, "train", await self._resources(best.text))
            texts = await asyncio.gather(*(self._write(best, lessons) for _ in range(self._candidates)))
            await self._try([(text, best.number) for text in texts], scoring, first.placeholders())
        logger.info(
            "the best prompt is number %d with %.3f:\n%s", self.best.number, self.best.score, self.best.text
        )

    async def _try(
        self, written: list[tuple[str, int | None]], scoring: list[Any], placeholders: set[str]
    ) -> None:
        """Score new prompts concurrently, and add them to the history."""
        made: list[Candidate] = []
        for text, parent in written:
            why = refusal(text, placeholders, [*self.history, *made])
            made.append(Candidate(len(self.history) + len(made), parent, text, refused=why))
        self.history += await asyncio.gather(*(self._score(one, scoring) for one in made))

    async def _score(self, one: Candidate, scoring: list[Any]) -> Candidate:
        if one.refused:
            logger.info("prompt %d is refused: %s", one.number, one.refused)
            return one
        finished = await roll_out(self.get_store(), scoring, "val", await self._resources(one.text))
        if one.parent is None:
            must_score(finished)
        logger.info("prompt %d, from %s: %s", one.number, one.parent, shown(by_difficulty(finished)))
        return Candidate(one.number, one.parent, one.text, mean_reward(finished), None, finished)

    async def _resources(self, prompt: str) -> str:
        """Store resources with a prompt; returns their id."""
        resources = {**(self.get_initial_resources() or {}), PROMPT: rl.PromptTemplate(template=prompt)}
        return (await self.get_store().add_resources(resources)).resources_id

    async def _write(self, best: Candidate, lessons: list[FinishedRollout]) -> str:
        """Let the model write a new prompt from the worst rollouts of the current one."""
        worst = sorted(lessons, key=lambda item: item.reward or 0.0)[: self._shown]
        case = WRITER_CASE.format(prompt=best.text, rollouts="\n\n".join(map(as_lesson, worst)))
        try:
            reply = await self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "system", "content": WRITER}, {"role": "user", "content": case}],
                temperature=1.0,
            )
        except OpenAIError as error:
            raise ConfigError(
                f"the model {self._model!r} that writes prompts failed: {error}; check its endpoint and key"
            ) from error
        return unfenced(reply.choices[0].message.content or "")


WRITER = """You improve the system prompt of an agent that designs process flowsheets with three tools: \
get_schema (how to write a
flowsheet), run_simulation (simulates one) and get_result (the numbers of a simulation). An agent is graded \
by 0.4 x specifications
met by the numbers it has read, 0.3 x thrift with tool calls (failed ones count twice), 0.3 x accuracy of \
the numbers it reports.

Reply with the new system prompt and nothing else. Keep every placeholder in single braces as it is, and \
double all other braces.
State general working rules; do not solve the tasks shown."""
WRITER_CASE = """The present system prompt:
<<<
{prompt}
>>>

Rollouts with it, the worst first:

{rollouts}"""


def as_lesson(item: FinishedRollout) -> str:
    """Describe a rollout for the writer of prompts: task, grade, every tool call with its result."""
    task, found = item.rollout.input, grade(item.rollout.input, item.spans)
    lines = [
        f"Task: {task['text']}",
        _graded(found, failure_of(item)),
        f"Budget: {task['budget']} tool calls. Made:",
    ]
    for call in tool_calls(item.spans):
        became = (
            f"error {json.dumps(call.output['error'])}"
            if call.failed
            else call.output.get("status", "answered")
        )
        lines.append(f"- {call.name} {json.dumps(call.arguments)[:600]} -> {became}")
    return "\n".join(lines)


def _graded(found: Grade, failure: str | None) -> str:
    ended = f" It ended in an error: {failure}" if failure else ""
    return (
        f"Completion {found.completion:.2f}, thrift {found.efficiency:.2f}, accuracy "
        f"{found.quality:.2f}.{ended}"
    )


def refusal(text: str, placeholders: set[str], tried: Sequence[Candidate]) -> str | None:
    """Return the reason to reject a prompt; None to try it."""
    if any(one.text == text for one in tried):
        return "it was tried before"
    try:
        found = rl.PromptTemplate(template=text).placeholders()
    except PromptError as error:
        return str(error)
    if found != placeholders:
        return f"its placeholders are {sorted(found)} instead of {sorted(placeholders)}"
    return None


def unfenced(text: str) -> str:
    """Remove the code fence that some models put around a text."""
    lines = text.strip().splitlines()
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```"
    return "\n".join(lines[1:-1] if fenced else lines) + "\n"


def shown(scores: dict[str, float]) -> str:
    """Format scores in one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
