"""Every way in which people write a base URL reaches the route; any other path is told the routes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from dialect_helpers import Say, listening
from gateway_helpers import KEY, MINE, SECRET, Replica, Site

from raylight.engines.capture_context import AttemptScope

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network for prices
HI: Any = [{"role": "user", "content": "hi"}]
BASES = ["{0}", "{0}/", "{0}/v1", "{0}/v1/", "{0}/v1//", "{0}/v1/v1"]
"""Base URLs; 0 is the address of an attempt."""
ROOTS = ["/v1" + MINE, MINE]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Replica, str]]:
    replica = Replica()
    with listening(replica.app) as address:
        yield replica, address


@pytest.fixture
def replica(served: tuple[Replica, str]) -> Replica:
    served[0].says[:] = [Say("hello")]
    served[0].attempts.clear()
    return served[0]


@pytest.fixture
def address(served: tuple[Replica, str]) -> str:
    return served[1]


def chat(base: str) -> str:
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        return client.chat.completions.create(model="policy", messages=HI).choices[0].message.content or ""


def responses(base: str) -> str:
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        return client.responses.create(model="policy", input="hi").output_text


def messages(base: str) -> str:
    with anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0) as client:
        (block,) = client.messages.create(model="policy", messages=HI, max_tokens=5).content
        return block.text  # type: ignore[union-attr]


def litellm_of(provider: str) -> Callable[[str], str]:
    def ask(base: str) -> str:
        import litellm

        reply = litellm.completion(f"{provider}/policy", HI, api_base=base, api_key=KEY, max_tokens=5)
        return reply.choices[0].message.content

    return ask


def langchain(base: str) -> str:
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(base_url=base, api_key=KEY, model="policy", max_retries=0)  # type: ignore[arg-type]
    return str(client.invoke("hi").content)


CLIENTS = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "LiteLLM openai": litellm_of("openai"),
    "LiteLLM anthropic": litellm_of("anthropic"),
    "LangChain": langchain,
}
MODULES = {"LiteLLM openai": "litellm", "LiteLLM anthropic": "litellm", "LangChain": "langchain_openai"}
"""Module that a client needs besides the SDKs."""


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    "client",
    [
        pytest.param(name, marks=pytest.mark.framework(MODULES[name])) if name in MODULES else name
        for name in CLIENTS
    ],
)
def test_a_client_reaches_its_route(
    replica: Replica, address: str, client: str, base: str, root: str
) -> None:
    assert CLIENTS[client](base.format(address + root)) == "hello"
    assert replica.attempts == [AttemptScope("ro-1", "at-1")]


@pytest.mark.parametrize("base", BASES)
def test_a_server_without_attempts_is_reached_too(replica: Replica, address: str, base: str) -> None:
    with openai.OpenAI(base_url=base.format(address), api_key=SECRET, max_retries=0) as client:
        assert (
            client.chat.completions.create(model="policy", messages=HI).choices[0].message.content == "hello"
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat", "/api", "/openai/v1"])
def test_a_base_url_that_leads_nowhere_is_told_the_routes(address: str, path: str) -> None:
    with (
        openai.OpenAI(base_url=address + MINE + path, api_key=KEY) as client,
        pytest.raises(
            openai.NotFoundError, match=r"Invalid URL \(POST .*POST /v1/messages/count_tokens"
        ) as caught,
    ):
        client.chat.completions.create(model="policy", messages=HI)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat//completions", "/messages"]
)
async def test_slashes_and_versions_are_read_once_for_all_layers(path: str) -> None:
    site = Site()
    assert (await site.post(MINE + path)).status_code == 200
    assert site.inner.seen[0][0] == ("/v1/messages" if path == "/messages" else "/v1/chat/completions")


@pytest.mark.parametrize(("path", "expected"), [("/health/", 200), ("/v1/health", 200), ("/metrics/", 401)])
async def test_routes_beside_v1(path: str, expected: int) -> None:
    assert (await Site().get(path, key=None)).status_code == expected
    assert (await Site().get(MINE + path, key=KEY)).status_code == 404
