"""Conversation of a test: calls in one dialect for a separate attempt, and their records."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from engine_server import SECRET, EngineServer
from feature_dialects import Dialect, DialectAnswer

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.semconv import DIALECT, PROMPT_SOURCE
from raylight.types import FinishedRollout

REFUSALS = (openai.BadRequestError, anthropic.BadRequestError)


class Conversation:
    """Attempt with its clients.

    Attributes:
        refused: True if the engine rejected a request as expected.
        answers: all answers received so far.
    """

    def __init__(self, server: EngineServer, dialect: Dialect, feature: str) -> None:
        self.server, self.dialect, self.feature = server, dialect, feature
        self.refused = False
        self.answers: list[DialectAnswer] = []
        self._rollout = server.call(server.store.start_rollout("task"))
        assert self._rollout.attempt is not None
        ids = self._rollout.rollout_id, self._rollout.attempt.attempt_id
        base = f"http://127.0.0.1:{server.port}{attempt_path(*ids)}"
        self._client_options: dict[str, Any] = {
            "base_url": dialect.base(base),
            "api_key": attempt_key(SECRET, *ids),
            "max_retries": 0,
        }
        self.client = dialect.sync_client(**self._client_options)

    def ask(self, *turns: Any, **asked: Any) -> DialectAnswer:
        """Send the turns of a conversation, and keep the model's answer."""
        self.answers.append(self.dialect.ask(self.client, [*turns], **asked))
        return self.answers[-1]

    def ask_together(self, texts: list[str], **asked: Any) -> list[DialectAnswer]:
        """Send several requests concurrently with the asynchronous client."""

        async def ask_all() -> list[DialectAnswer]:
            async with self.dialect.async_client(**self._client_options) as client:
                return await asyncio.gather(
                    *(self.dialect.ask_async(client, [user(text)], **asked) for text in texts)
                )

        self.answers += asyncio.run(ask_all())
        return self.answers

    def recorded(self) -> FinishedRollout:
        """Finish the attempt, and return its records in chronological order.

        Assert that every answer has a recorded call with its tokens.
        """
        self.server.call(self.server.store.finish_attempt(self._rollout, "succeeded"))
        (finished,) = self.server.call(self.server.store.collect([self._rollout.rollout_id], with_spans=True))
        assert finished.rollout.status == "succeeded"
        finished.generations.sort(key=lambda generation: generation.start_time)
        finished.spans.sort(key=lambda span: span.start_time or 0)
        lengths = [len(generation.output_ids) for generation in finished.generations]
        spans = [span.attributes[DIALECT] for span in finished.spans if PROMPT_SOURCE in span.attributes]
        calls = sum(len(answer.texts) for answer in self.answers)
        assert spans.count(self.dialect.name) == calls
        assert len(lengths) == (calls if self.server.tokenizer else 0)
        if self.server.tokenizer:
            assert sum(lengths) == sum(answer.tokens for answer in self.answers)
            assert calls > len(self.answers) or sorted(lengths) == sorted(
                answer.tokens for answer in self.answers
            )
        return finished

    @contextlib.contextmanager
    def refusal(self, *parts: str) -> Iterator[None]:
        """Expect the request of this block to be rejected, with a reason that has some parts."""
        with pytest.raises(REFUSALS) as caught:
            yield
        body: Any = caught.value.body
        message = body["error"]["message"] if "error" in body else body["message"]
        assert len(message) > 15
        assert "Traceback" not in message
        assert [part for part in parts if part not in message] == []
        self.recorded()
        self.refused = True

    def close(self) -> None:
        self.client.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
