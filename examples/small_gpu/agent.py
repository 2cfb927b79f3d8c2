"""The agent that answers questions, and the hook that rewards it."""

from __future__ import annotations

import re
from typing import Any

import raylight as rl
from raylight.types import Span

MARKER = "####"
"""Marker before the answer in a chain of thought."""
PROMPTS = {
    "cot": (
        "Solve the problem. Think step by step, with one short calculation in each line. End with a line "
        "that holds only "
        f"{MARKER} and the resulting number.\n\nProblem: {{question}}"
    ),
    "plain": "{question}",
}
"""Prompts by name: cot asks for a chain of thought; plain is for a model that responds with the number only.
"""
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
WELL_FORMED = 0.1
"""Reward of a wrong answer in the right format, which gives a model that forgets the format a signal to learn
from."""
TOLERANCE = 1e-4


class MathSolver(rl.LitAgent[dict[str, Any]]):
    """Calls the model once and emits its response as a message; `NumberReward` computes the reward.

    Args:
        prompt: a key of `PROMPTS`.
        max_tokens: maximum length of a response.
    """

    def __init__(self, prompt: str = "cot", max_tokens: int = 256) -> None:
        super().__init__()
        self.prompt = prompt
        self.max_tokens = max_tokens

    async def rollout_async(
        self, task: dict[str, Any], resources: rl.NamedResources, rollout: rl.Rollout
    ) -> None:
        """Answer one question; the hook scores it."""
        llm: rl.LLM = resources["llm"]
        sampling = {"temperature": 1.0, "max_tokens": self.max_tokens} | llm.sampling_parameters
        message: Any = {"role": "user", "content": PROMPTS[self.prompt].format(question=task["question"])}
        reply = await llm.client().chat.completions.create(model=llm.model, messages=[message], **sampling)
        rl.emit_message(reply.choices[0].message.content or "")


class NumberReward(rl.Hook):
    """Rewards a rollout by the number in its message: 1 if it is right, 0.1 if only its format is right, else
    0.

    Args:
        prompt: prompt of the agent, which determines the format of the answer.
    """

    strict = True  # a reward that cannot be computed is a failure, not a rollout without reward

    def __init__(self, prompt: str = "cot") -> None:
        self.prompt = prompt

    def on_rollout_end(self, *, rollout: rl.Rollout, spans: list[Span]) -> None:  # type: ignore[override]
        texts = [text for span in spans if (text := rl.get_message_value(span)) is not None]
        if not texts:
            return  # the agent failed before its response; the rollout has the reason
        found = read_number(texts[-1], self.prompt)
        correct = found is not None and is_right(found, rollout.input["answer"])
        reward = 1.0 if correct else WELL_FORMED if found is not None else 0.0
        rl.emit_reward({"reward": reward, "correct": float(correct)}, primary_key="reward")


def read_number(text: str, prompt: str) -> float | None:
    """Return the number in a response: the text after the last marker, or for `plain` the whole text; None if
    it is not a number."""
    if prompt == "cot":
        _, marker, text = text.rpartition(MARKER)
        if not marker:
            return None
    found = NUMBER.fullmatch(text.replace("\N{MINUS SIGN}", "-").strip().strip("$").rstrip("."))
    return float(found[0].replace(",", "")) if found else None


def is_right(found: float, answer: float) -> bool:
    """True if a number equals the answer, up to rounding."""
    return abs(found - answer) <= TOLERANCE * max(abs(answer), 1.0)
