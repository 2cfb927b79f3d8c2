"""The agent that answers questions, and the hook that rewards it."""

from __future__ import annotations

import functools
import re
from typing import Any

from openai import AsyncOpenAI

import raylight as rl
from raylight.types import Span

MARKER = "####"
"""What stands before the answer where the model thinks first."""
PROMPTS = {
    "cot": (
        "Solve the problem. Think step by step, with one short calculation in each line. End with a line that holds only "
        f"{MARKER} and the resulting number.\n\nProblem: {{question}}"
    ),
    "plain": "{question}",
}
"""cot asks for a chain of thought; plain is for a model that answers with the number at once."""
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
WELL_FORMED = 0.1
"""Reward of an answer in the right form that is wrong: it gives a model that forgets the form something to learn from."""
TOLERANCE = 1e-4


@functools.cache
def client() -> AsyncOpenAI:
    """One HTTP client for all rollouts of a process."""
    return AsyncOpenAI(base_url="http://unset", api_key="unset")


class MathSolver(rl.LitAgent[dict[str, Any]]):
    """Asks the model once, and says its answer in a message. The reward is the business of `NumberReward`.

    Args:
        prompt: a key of `PROMPTS`.
        max_tokens: of an answer.
    """

    def __init__(self, prompt: str = "cot", max_tokens: int = 256) -> None:
        super().__init__()
        self.prompt = prompt
        self.max_tokens = max_tokens

    async def rollout_async(
        self, task: dict[str, Any], resources: rl.NamedResources, rollout: rl.Rollout
    ) -> None:
        """One question; scored by the hook."""
        llm: rl.LLM = resources["llm"]
        sampling = {"temperature": 1.0, "max_tokens": self.max_tokens} | llm.sampling_parameters
        message: Any = {"role": "user", "content": PROMPTS[self.prompt].format(question=task["question"])}
        reply = (
            await client()
            .with_options(base_url=llm.endpoint, api_key=llm.api_key)
            .chat.completions.create(model=llm.model, messages=[message], **sampling)
        )
        rl.emit_message(reply.choices[0].message.content or "")


class NumberReward(rl.Hook):
    """Rewards a rollout by the number that its message gives: 1 if it is the task's, 0.1 if it is in the right form, else 0.

    Args:
        prompt: that of the agent, which tells where the number stands.
    """

    strict = True  # a reward that cannot be computed is a failure, not a rollout without reward

    def __init__(self, prompt: str = "cot") -> None:
        self.prompt = prompt

    def on_rollout_end(self, *, rollout: rl.Rollout, spans: list[Span]) -> None:  # type: ignore[override]
        texts = [text for span in spans if (text := rl.get_message_value(span)) is not None]
        if not texts:
            return  # the agent failed before it had an answer, and its rollout tells why
        found = read_number(texts[-1], self.prompt)
        correct = found is not None and is_right(found, rollout.input["answer"])
        reward = 1.0 if correct else WELL_FORMED if found is not None else 0.0
        rl.emit_reward({"reward": reward, "correct": float(correct)}, primary_key="reward")


def read_number(text: str, prompt: str) -> float | None:
    """The number that an answer gives: the one after the last marker, or for `plain` the whole text; None if there is none."""
    if prompt == "cot":
        _, marker, text = text.rpartition(MARKER)
        if not marker:
            return None
    found = NUMBER.fullmatch(text.replace("\N{MINUS SIGN}", "-").strip().strip("$").rstrip("."))
    return float(found[0].replace(",", "")) if found else None


def is_right(found: float, answer: float) -> bool:
    """Whether a number is the answer, but for rounding."""
    return abs(found - answer) <= TOLERANCE * max(abs(answer), 1.0)
