"""A scripted model behind the whole gateway with a store, and the SDKs' clients of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
from app_clients import anthropic_client, openai_client
from gateway_helpers import SECRET
from store_helpers import Box, ids_of, open_box
from template_helpers import template
from transformers_helpers import MakeEngine, restyle, script
from unit_helpers import within

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.types import Generation

Messages = list[dict[str, Any]]


class Table:
    """A scripted model behind the gateway, and the SDKs' clients of one attempt.

    Attributes:
        openai: client of OpenAI's SDK.
        anthropic: client of Anthropic's.
    """

    def __init__(
        self, engine: Any, box: Box, rollout: Any, client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic
    ) -> None:
        self.engine, self._box, self._rollout = engine, box, rollout
        self.openai, self.anthropic = client, other

    async def ask(self, messages: Messages, answer: str, **fields: Any) -> Any:
        """Send messages that are answered with a text; return the message of the answer."""
        script(self.engine, answer)
        reply = await self.openai.chat.completions.create(
            model="policy",
            messages=messages,  # type: ignore[arg-type]
            max_completion_tokens=fields.pop("max_tokens", 150),
            temperature=1.0,
            **fields,
        )
        return reply.choices[0].message

    async def recorded(self) -> list[Generation]:
        await self._box.store.finish_attempt(self._rollout, "succeeded")
        (finished,) = await self._box.store.collect([self._rollout.rollout_id])
        return finished.generations

    def stored_bytes(self) -> tuple[int, int]:
        """Return the bytes of the calls and of their spans in the store's file."""
        journal = self._box.service._journal
        row = journal.fetch_one(
            "SELECT (SELECT SUM(LENGTH(generation)) FROM calls), (SELECT SUM(LENGTH(body)) FROM spans)"
        )
        return row[0], row[1]


@asynccontextmanager
async def open_table(make_engine: MakeEngine, chat_template: str, **settings: Any) -> AsyncIterator[Table]:
    engine = make_engine()
    restyle(engine, template(chat_template))
    async with within(60), open_box() as box:
        rollout = await box.take()
        recorder = Recorder(box.store.capture)
        app = build_gateway(await engine.app(), engine, SECRET, recorder, None, **settings)
        url = f"http://replica{attempt_path(*ids_of(rollout))}/v1"
        key = attempt_key(SECRET, *ids_of(rollout))
        async with (
            openai_client(app, url, key) as client,
            anthropic_client(app, url.removesuffix("/v1"), key) as other,
        ):
            yield Table(engine, box, rollout, client, other)
        await recorder.aclose()


def assert_one_row(calls: list[Generation], *kinds: str) -> None:
    """Assert that calls are one row, with these kinds of continuations."""
    made = build_trajectories(calls)
    assert made.relations == ["start"] + ["extension"] * (len(calls) - 1)
    (row,) = made.rows
    assert row.token_ids.tolist() == calls[-1].token_ids.tolist()
    assert [call.history.kind for call in calls[1:] if call.history] == list(kinds)
