"""A conversation of a test: calls in one dialect for an attempt of its own, and their records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from feature_site import SECRET, Site
from feature_speakers import Dialect, DialectAnswer

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.semconv import DIALECT, PROMPT_SOURCE
from raylight.types import FinishedRollout

REFUSALS = (openai.BadRequestError, anthropic.BadRequestError)


class Talk:
    """An attempt and its clients.

    Attributes:
        refused: True if the engine rejected a request as expected.
        answers: the answers so far.
    """

    def __init__(self, site: Site, dialect: Dialect, feature: str) -> None:
        self.site, self.dialect, self.feature = site, dialect, feature
        self.refused = False
        self.answers: list[DialectAnswer] = []
        self._rollout = site.call(site.store.start_rollout("task"))
        assert self._rollout.attempt is not None
        ids = self._rollout.rollout_id, self._rollout.attempt.attempt_id
        base = f"http://127.0.0.1:{site.port}{attempt_path(*ids)}"
        self._given: dict[str, Any] = {
            "base_url": dialect.base(base),
            "api_key": attempt_key(SECRET, *ids),
            "max_retries": 0,
        }
        self.client = dialect.sync_client(**self._given)

    def ask(self, *turns: Any, **asked: Any) -> DialectAnswer:
        """Have the model continue a conversation, and keep its answer."""
        self.answers.append(self.dialect.ask(self.client, [*turns], **asked))
        return self.answers[-1]

    def ask_together(self, texts: list[str], **asked: Any) -> list[DialectAnswer]:
        """Send several requests concurrently with the asynchronous client."""

        async def ask_all() -> list[DialectAnswer]:
            async with self.dialect.async_client(**self._given) as client:
                return await asyncio.gather(
                    *(self.dialect.ask_async(client, [user(text)], **asked) for text in texts)
                )

        self.answers += asyncio.run(ask_all())
        return self.answers

    def recorded(self) -> FinishedRollout:
        """Finish the attempt, and return its records in the order of time.

        Every answer must have a call with its tokens.
        """
        self.site.call(self.site.store.finish_attempt(self._rollout, "succeeded"))
        (found,) = self.site.call(self.site.store.collect([self._rollout.rollout_id], with_spans=True))
        assert found.rollout.status == "succeeded"
        found.generations.sort(key=lambda generation: generation.start_time)
        found.spans.sort(key=lambda span: span.start_time or 0)
        lengths = [len(generation.output_ids) for generation in found.generations]
        spans = [span.attributes[DIALECT] for span in found.spans if PROMPT_SOURCE in span.attributes]
        calls = sum(len(answer.texts) for answer in self.answers)
        assert spans.count(self.dialect.name) == calls
        assert len(lengths) == (calls if self.site.tokenizer else 0)
        if self.site.tokenizer:
            assert sum(lengths) == sum(answer.tokens for answer in self.answers)
            assert calls > len(self.answers) or sorted(lengths) == sorted(
                answer.tokens for answer in self.answers
            )
        return found

    @contextlib.contextmanager
    def refusal(self) -> Iterator[None]:
        """Expect the engine to reject the request of this block with a reason."""
        with pytest.raises(REFUSALS) as caught:
            yield
        body: Any = caught.value.body
        message = body["error"]["message"] if "error" in body else body["message"]
        assert len(message) > 15
        assert "Traceback" not in message
        self.recorded()
        self.refused = True

    def close(self) -> None:
        self.client.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
