"""Two algorithms of the example's own: one that measures the agent, and one that rewrites its prompt."""

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
"""Name of the resource that is rewritten."""
TIMEOUT_S = 900.0
"""Of a rollout."""


async def roll_out(
    store: rl.StoreClient, tasks: Sequence[Any], mode: RolloutMode, resources_id: str | None
) -> list[FinishedRollout]:
    """Roll every task out once and wait for all.

    Raises:
        RolloutsFailedError: some were lost, by the simulator or the cluster, so that a mean would not tell of the agent.
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
            f"{len(lost)} of {len(finished)} rollouts were lost through no fault of the agent: {errors_of(lost)}. Start again when "
            "that is mended"
        )
    return finished


def must_score(finished: list[FinishedRollout]) -> list[FinishedRollout]:
    """Raise RolloutsFailedError if no rollout was scored."""
    if all(item.reward is None for item in finished):
        raise RolloutsFailedError(f"none of {len(finished)} rollouts was scored: {errors_of(finished)}")
    return finished


def is_lost(item: FinishedRollout) -> bool:
    """Whether a rollout failed by the simulator or the cluster."""
    attempt = item.rollout.attempt
    failure = attempt.failure if attempt else None
    by_simulator = failure is not None and failure.error.startswith(SimulatorUnavailableError.__name__)
    return by_simulator or (failure is not None and failure.kind in ("infrastructure", "cancelled"))


def errors_of(finished: Sequence[FinishedRollout]) -> str:
    """The different errors of rollouts, in a line."""
    return "; ".join(sorted({failure for item in finished if (failure := failure_of(item))})) or "no reward"


def failure_of(item: FinishedRollout) -> str | None:
    """Why a rollout failed; None if it did not."""
    attempt = item.rollout.attempt
    return attempt.failure.error if attempt and attempt.failure else None


def describe(item: FinishedRollout) -> str:
    """A rollout in a line: task, reward and what it is made of, calls of tools."""
    task, title = item.rollout.input, f"{item.rollout.mode} {item.rollout.input['id']}"
    if item.reward is None:
        return f"{title}: {item.rollout.status}, {failure_of(item) or 'no reward'}"
    found = grade(task, item.spans)
    return (
        f"{title}: reward {item.reward:.3f} (completion {found.completion:.2f}, efficiency {found.efficiency:.2f}, quality "
        f"{found.quality:.2f}), {found.calls} calls, {found.failed} failed"
    )


def mean_reward(finished: Sequence[FinishedRollout]) -> float:
    """Mean over the tasks; a rollout that ended in an error of the agent counts 0."""
    return statistics.fmean(item.reward or 0.0 for item in finished)


def by_difficulty(finished: Sequence[FinishedRollout]) -> dict[str, float]:
    """Mean reward of each difficulty, and of all."""
    groups: dict[str, list[FinishedRollout]] = {}
    for item in finished:
        groups.setdefault(item.rollout.input["difficulty"], []).append(item)
    return {name: mean_reward(items) for name, items in groups.items()} | {"all": mean_reward(finished)}


class DesignBaseline(rl.FastAlgorithm):
    """Rolls every task out once and tells the rewards; changes nothing."""

    def __init__(self) -> None:
        self.scores: dict[str, dict[str, float]] = {}
        """By mode: mean reward by difficulty, and of all."""
        self.finished: list[FinishedRollout] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Measure the agent.

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
        number, parent: places in the history; the first prompt has no parent.
        score: mean reward on the scoring tasks; None if it was refused before it was tried.
        refused: why it was.
    """

    number: int
    parent: int | None
    text: str
    score: float | None = None
    refused: str | None = None
    finished: list[FinishedRollout] = field(default_factory=list, repr=False)

    def told(self) -> dict[str, Any]:
        """For a file."""
        return {
            "number": self.number,
            "parent": self.parent,
            "score": self.score,
            "refused": self.refused,
            "text": self.text,
        }


class PromptOptimiser(rl.Algorithm):
    """Rewrites the agent's system prompt by what went wrong with it, and keeps a rewriting only if it scores better.

    Each round: the best prompt is rolled out on a batch of training tasks; a model reads its worst rollouts and writes new prompts;
    those that keep the placeholders are scored on the scoring tasks; the best one so far stays, and ties go to the older one. The
    scoring tasks are the validation tasks, or else the training tasks.

    Args:
        client, model: of the model that writes prompts.
        rounds: of rewriting.
        candidates: new prompts a round.
        batch: training tasks a round; they are taken in turn.
        shown: of the worst rollouts of a batch, how many the writer reads.
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
        """The prompt with the highest score; of equals, the oldest."""
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
            ConfigError: there is no prompt among the resources.
            DatasetError: there are no training tasks.
            RolloutsFailedError: some rollouts were lost, or none with the first prompt was scored.
            ConfigError: the model that writes prompts does not answer.
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
        """Score new prompts, side by side, and add them to the history."""
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
        """The id of the resources with a prompt."""
        resources = {**(self.get_initial_resources() or {}), PROMPT: rl.PromptTemplate(template=prompt)}
        return (await self.get_store().add_resources(resources)).resources_id

    async def _write(self, best: Candidate, lessons: list[FinishedRollout]) -> str:
        """A new prompt, by the model, from the worst rollouts of the present one."""
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


WRITER = """You improve the system prompt of an agent that designs process flowsheets with three tools: get_schema (how to write a
flowsheet), run_simulation (simulates one) and get_result (the numbers of a simulation). An agent is graded by 0.4 x specifications
met by the numbers it has read, 0.3 x thrift with tool calls (failed ones count twice), 0.3 x accuracy of the numbers it reports.

Reply with the new system prompt and nothing else. Keep every placeholder in single braces as it is, and double all other braces.
State general working rules; do not solve the tasks shown."""
WRITER_CASE = """The present system prompt:
<<<
{prompt}
>>>

Rollouts with it, the worst first:

{rollouts}"""


def as_lesson(item: FinishedRollout) -> str:
    """A rollout as the writer of prompts reads it: the task, the grade, every call of a tool with what became of it."""
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
    return f"Completion {found.completion:.2f}, thrift {found.efficiency:.2f}, accuracy {found.quality:.2f}.{ended}"


def refusal(text: str, placeholders: set[str], tried: Sequence[Candidate]) -> str | None:
    """Why a prompt is not tried; None if it is."""
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
    """A text without the code fence that some models put around it."""
    lines = text.strip().splitlines()
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```"
    return "\n".join(lines[1:-1] if fenced else lines) + "\n"


def shown(scores: dict[str, float]) -> str:
    """Scores in a line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
