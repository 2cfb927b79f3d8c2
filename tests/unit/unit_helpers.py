"""Makers of small records and stand-ins for engines, shared by the unit tests."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from raylight.serving.engine import Sampled, SamplingParams
from raylight.types import Attempt, CallKey, Failure, FinishedRollout, Generation, Rollout, RolloutConfig

DEADLINE_S = 10.0
"""No wait of a unit test is longer; a correct one is over in milliseconds."""

_numbers = itertools.count()


def within(seconds: float = DEADLINE_S) -> Any:
    return asyncio.timeout(seconds)


def make_key(rollout_id: str = "ro-1", attempt_id: str = "at-1", call_id: str | None = None) -> CallKey:
    return CallKey(rollout_id, attempt_id, call_id or f"call-{next(_numbers)}")


def make_generation(
    prompt: list[int],
    output: list[int],
    *,
    key: CallKey | None = None,
    temperature: float = 1.0,
    logprobs: list[float] | None = None,
    versions: list[int] | None = None,
    start: float = 0.0,
) -> Generation:
    return Generation(
        key=key or make_key(), model="policy", prompt_ids=prompt, output_ids=output,
        logprobs=logprobs if logprobs is not None else [-1.0] * len(output),
        weight_versions=versions if versions is not None else [0] * len(output),
        finish_reason="stop", start_time=start, end_time=start + 1, sampling={"temperature": temperature},
    )  # fmt: skip


def make_rollout(rollout_id: str = "ro-1", *, attempt_id: str = "at-1", task: Any = None, **fields: Any) -> Rollout:
    attempt = Attempt(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, start_time=0.0)
    config = RolloutConfig(timeout_seconds=fields.pop("timeout", 600.0))
    return Rollout(input=task, rollout_id=rollout_id, start_time=0.0, attempt=attempt, config=config, **fields)


def make_finished(
    reward: float | None = None,
    *,
    failure: Failure | None = None,
    group: str | None = "g",
    calls: int = 1,
    rollout_id: str | None = None,
    status: str | None = None,
) -> FinishedRollout:
    """A decided rollout with `calls` calls that do not continue one another, so that each is a row."""
    rollout_id = rollout_id or f"ro-{next(_numbers)}"
    rollout = make_rollout(rollout_id, group_id=group, status=status or ("failed" if failure else "succeeded"))
    attempt = rollout.attempt.model_copy(update={"failure": failure, "status": "failed" if failure else "succeeded"})
    rollout = rollout.model_copy(update={"attempt": attempt})
    generations = [make_generation([1, 2], [3 + i], key=make_key(rollout_id)) for i in range(calls)]
    return FinishedRollout(rollout, reward, generations)


class LetterTokenizer:
    """A token is a character's code point."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]] or [1]

    def decode(self, ids: list[int], **settings: Any) -> str:
        return "".join(chr(i) for i in ids)


class FakeEngine:
    """Answers every request with the same text; `gate` holds answers back, `calls` and `cancelled` tell what happened."""

    model = "policy"
    max_model_len = 64

    def __init__(self, answer: str = "hello") -> None:
        self.tokenizer = LetterTokenizer()
        self.answer = answer
        self.calls: list[tuple[list[int], SamplingParams]] = []
        self.cancelled = 0
        self.called = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Sampled:
        self.calls.append((prompt_ids, params))
        self.called.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        ids = [ord(letter) for letter in self.answer]
        return Sampled(ids, [-0.5] * len(ids), [3] * len(ids), "stop")

    def close(self) -> None:
        pass
