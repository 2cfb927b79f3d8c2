"""The critic with any answer of an endpoint, through a real client and a real server."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from unit_helpers import within

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.algorithm import APO
from raylight.algorithms.apo.critic import PromptCritic
from raylight.algorithms.apo.edits import RejectedEdit
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.apo.trials import Trial
from raylight.errors import ConfigError

TEMPLATE = PromptTemplate(template="{a}")


class Endpoint:
    """Server that answers every request with the same body."""

    def __init__(self, body: str, kind: str = "application/json", status: int = 200) -> None:
        self.body, self.kind, self.status = body, kind, status
        self.requests: list[dict[str, Any]] = []

    async def chat(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.Response(body=self.body.encode(), content_type=self.kind, status=self.status)


def completion(content: Any, reason: str = "stop") -> str:
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": reason}]}
    )


@contextlib.asynccontextmanager
async def critic(endpoint: Endpoint, settings: ApoSettings | None = None) -> AsyncIterator[PromptCritic]:
    from openai import AsyncOpenAI

    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=5) as client, within():
            yield PromptCritic(client, settings or ApoSettings())
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("<html>welcome</html>", "text/html"),
        ("hello", "text/plain"),
        ("{oops", "application/json"),
        ("", "application/json"),
        ("[]", "application/json"),
        ("null", "application/json"),
        ('{"error": {"message": "no credit"}}', "application/json"),
        ('{"choices": []}', "application/json"),
        ('{"choices": [null]}', "application/json"),
        ('{"choices": [{"message": null}]}', "application/json"),
        ('{"choices": "many"}', "application/json"),
        (completion(["a", "list"]), "application/json"),
        (completion(7), "application/json"),
    ],
)
async def test_an_answer_without_completion_is_a_rejected_branch(body: str, kind: str) -> None:
    async with critic(Endpoint(body, kind)) as models:
        with pytest.raises(RejectedEdit, match=r"no chat completion .*base_url") as caught:
            await models.edit(TEMPLATE, "too long", 0)
    assert caught.value.kind == "endpoint"


@pytest.mark.parametrize(
    ("content", "reason", "kind"),
    [("", "stop", "empty"), (None, "stop", "empty"), ("{a", "length", "cut off")],
)
async def test_an_empty_or_truncated_answer_is_rejected(content: Any, reason: str, kind: str) -> None:
    async with critic(Endpoint(completion(content, reason))) as models:
        with pytest.raises(RejectedEdit) as caught:
            await models.critique(TEMPLATE, [], 0)
    assert caught.value.kind == kind


async def test_lone_surrogates_are_replaced_in_requests_and_answers() -> None:
    endpoint = Endpoint(completion("half \ud800 of {a}"))
    async with critic(endpoint, ApoSettings(diversity_temperature=None)) as models:
        assert await models.edit(TEMPLATE, "cut \udfff here", 0) == "half ? of {a}"
        assert await models.critique(TEMPLATE, [Trial({(1, 2): "pair"}, "succeeded", 1.0)], 0)
    edited, criticised = (request["messages"][1]["content"] for request in endpoint.requests)
    assert "cut ? here" in edited
    assert "{(1, 2): 'pair'}" in criticised, "a task need not be JSON"
    assert "temperature" not in endpoint.requests[0]


def test_a_client_that_blocks_is_refused() -> None:
    from openai import OpenAI

    with (
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused") as client,
        pytest.raises(ConfigError, match="AsyncOpenAI"),
    ):
        APO(client)  # type: ignore[arg-type]
