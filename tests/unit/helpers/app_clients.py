"""Clients of the real SDKs in front of an application of this process."""

import anthropic
import httpx
import httpx2
import openai
from starlette.types import ASGIApp


def anthropic_client(
    app: ASGIApp, base_url: str = "http://engine", api_key: str = "key"
) -> anthropic.AsyncAnthropic:
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    return anthropic.AsyncAnthropic(
        base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
    )


def openai_client(
    app: ASGIApp, base_url: str = "http://engine/v1", api_key: str = "key"
) -> openai.AsyncOpenAI:
    # every supported release of openai takes a client of httpx, those before 3 no other
    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
