"""Questions by SDKs and frameworks to an attempt's address; each returns the text of its answer."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import openai
import pytest
from gateway_helpers import KEY

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network for prices
HI: Any = [{"role": "user", "content": "hi"}]


def chat(base: str, stream: bool = False, retries: int = 0, key: str = KEY) -> str:
    with openai.OpenAI(base_url=base, api_key=key, max_retries=retries) as client:
        reply: Any = client.chat.completions.create(model="policy", messages=HI, stream=stream)
        return str(list(reply)) if stream else reply.choices[0].message.content


def responses(base: str, stream: bool = False, retries: int = 0) -> str:
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=retries) as client:
        reply: Any = client.responses.create(model="policy", input="hi", stream=stream)
        return str(list(reply)) if stream else reply.output_text


def messages(base: str, stream: bool = False, retries: int = 0, key: str = KEY) -> str:
    with anthropic.Anthropic(base_url=base, api_key=key, max_retries=retries) as client:
        reply: Any = client.messages.create(model="policy", messages=HI, max_tokens=5, stream=stream)
        return str(list(reply)) if stream else reply.content[0].text


def litellm_of(provider: str) -> Callable[..., str]:
    def ask(base: str, stream: bool = False) -> str:
        import litellm

        litellm.suppress_debug_info = True
        reply = litellm.completion(
            f"{provider}/policy", HI, api_base=base, api_key=KEY, max_tokens=5, stream=stream, max_retries=0
        )
        return str(list(reply)) if stream else reply.choices[0].message.content

    return ask


def langchain(base: str, stream: bool = False) -> str:
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(base_url=base, api_key=KEY, model="policy", max_retries=0)  # type: ignore[arg-type]
    return str(list(client.stream("hi"))) if stream else str(client.invoke("hi").content)


CLIENTS: dict[str, Callable[..., str]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "LiteLLM openai": litellm_of("openai"),
    "LiteLLM anthropic": litellm_of("anthropic"),
    "LangChain": langchain,
}
MODULES = {
    "LiteLLM openai": "litellm",
    "LiteLLM anthropic": "litellm",
    "LangChain": "langchain_openai",
    "OpenAI Agents": "agents",
}
"""Module that a client needs besides the SDKs."""


def client_params(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test, those with a framework marked."""
    return [
        pytest.param(name, marks=pytest.mark.framework(MODULES[name])) if name in MODULES else name
        for name in names
    ]
