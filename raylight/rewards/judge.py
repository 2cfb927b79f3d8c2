"""A judge: a model that answers a question about rollouts in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from raylight.agent.resources import LLM
from raylight.errors import ConfigError, JudgeError
from raylight.rewards.group import record
from raylight.semconv import OPERATION, OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT, REQUEST_MODEL
from raylight.traces.messages import Message
from raylight.types import SpanCoreFields, TraceStatus

Verdict = TypeVar("Verdict")
MAX_ATTEMPTS, MAX_CONCURRENT = 3, 16


class Judge:
    """Asks a model, and reads its answer. Each request is recorded as a span of the group.

    Args:
        llm: the model, with its endpoint.
        name: name of the spans' operation.
        attempts: requests until an answer can be read. A request that follows an unreadable answer quotes it.
        max_concurrent: requests at the same time.

    Raises:
        ConfigError: the model has no endpoint or no name, or a number is not positive.
    """

    def __init__(
        self, llm: LLM, name: str, attempts: int = MAX_ATTEMPTS, max_concurrent: int = MAX_CONCURRENT
    ) -> None:
        if not isinstance(llm, LLM) or not llm.endpoint or not llm.model:
            raise ConfigError(
                f"the judge is {llm!r:.80}; give an rl.LLM(endpoint='https://.../v1', model=...) that "
                "answers chat completions"
            )
        if attempts < 1 or max_concurrent < 1:
            raise ConfigError(f"attempts={attempts} and max_concurrent={max_concurrent} must be at least 1")
        self._llm, self._name, self._attempts = llm, name, attempts
        sampling = {key: value for key, value in llm.sampling_parameters.items() if key != "extra_headers"}
        self.identity = [llm.model, sampling]  # headers may have keys, and this is in config.yaml
        self._max_concurrent = max_concurrent
        self._free: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def ask(self, messages: list[Message], read: Callable[[Any], Verdict]) -> Verdict:
        """Return what `read` makes of the JSON value in the model's answer.

        Args:
            read: raises a ValueError, LookupError or TypeError for a value that it cannot read.

        Raises:
            JudgeError: the model did not answer, or no answer could be read.
        """
        asked, problem = list(messages), ""
        for _ in range(self._attempts):
            text = await self._answer(asked)
            try:
                return read(find_json(text))
            except (ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            retry = f"This answer cannot be used ({problem}). Answer again, with nothing but the JSON object."
            asked = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": retry}]
        raise JudgeError(
            f"no answer of the judge {self._llm.model!r} could be read in {self._attempts} attempts: "
            f"{problem}; choose a model that follows the format"
        )

    async def _answer(self, messages: list[Message]) -> str:
        import openai

        start, text, problem = time.time(), "", None
        try:
            async with self._slot():
                reply = await self._llm.client().chat.completions.create(
                    model=self._llm.model,
                    messages=messages,  # type: ignore[arg-type]
                    **self._llm.sampling_parameters,
                )
            text = reply.choices[0].message.content or ""
        except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
        record(
            SpanCoreFields(
                name=OPERATION,
                status=TraceStatus(status_code="OK" if problem is None else "ERROR", description=problem),
                attributes={
                    OPERATION_NAME: self._name,
                    OPERATION_INPUT: json.dumps(messages),
                    OPERATION_OUTPUT: text,
                    REQUEST_MODEL: self._llm.model,
                },
                start_time=start,
                end_time=time.time(),
            )
        )
        if problem is not None:  # the client has repeated what can be repeated
            raise JudgeError(
                f"the judge {self._llm.model!r} at {self._llm.endpoint} did not answer: {problem}; check its "
                "endpoint, its key and its limits"
            )
        return text

    def _slot(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the limit of concurrent requests in this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._free:
            self._free.clear()
            self._free[loop] = asyncio.Semaphore(self._max_concurrent)
        return self._free[loop]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_free": {}}


def find_json(text: str) -> object:
    """Return the last JSON object in a text that is not part of another; models think before, and put fences
    around.

    Raises:
        ValueError: there is none.
    """
    decoder, found, start = json.JSONDecoder(), None, text.find("{")
    while start >= 0:
        try:
            found, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        start = text.find("{", end)
    if found is None:
        raise ValueError(f"there is no JSON object in {text[:80]!r}")
    return found


def as_score(value: object) -> float:
    """Return a score of 0 to 1.

    Raises:
        ValueError: it is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"the score {value!r} is not a number from 0 to 1")
    return float(value)
