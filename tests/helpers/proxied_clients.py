"""An agent that calls its model and a model outside with clients that obey the proxies of the environment."""

import asyncio
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai
import requests

import raylight as rl

MESSAGES: Any = [{"role": "user", "content": "1+1="}]
EARLY = openai.OpenAI(base_url="http://unused/v1", api_key="unused")
EARLY_HTTP = httpx.Client(timeout=60)
"""Clients that read the environment when this module is imported."""
NODE = """
const {URL: url, KEY: key, BODY: body} = process.env
const headers = {"content-type": "application/json", authorization: `Bearer ${key}`}
fetch(url, {method: "POST", headers, body}).then(async reply => {
  if (!reply.ok) throw new Error(await reply.text())
})
"""
"""Program for Node, whose fetch obeys the environment from version 24 on, if NODE_USE_ENV_PROXY is set."""


def _call_openai(client: openai.OpenAI, llm: rl.LLM) -> None:
    client = client.with_options(base_url=llm.endpoint, api_key=llm.api_key or "")
    client.chat.completions.create(model=llm.model, messages=MESSAGES, max_tokens=2)


def _call_anthropic(llm: rl.LLM) -> None:
    root = llm.endpoint.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=llm.api_key) as client:
        client.messages.create(model=llm.model, messages=MESSAGES, max_tokens=2)


def _request(llm: rl.LLM) -> dict[str, Any]:
    body = {"model": llm.model, "messages": MESSAGES, "max_tokens": 2}
    return {"json": body, "headers": {"Authorization": f"Bearer {llm.api_key}"}}


async def _call_aiohttp(llm: rl.LLM) -> None:
    async with (
        aiohttp.ClientSession(trust_env=True, raise_for_status=True) as session,
        session.post(f"{llm.endpoint}/chat/completions", **_request(llm)) as reply,
    ):
        await reply.read()


def _call_urllib(llm: rl.LLM) -> None:
    request = _request(llm)
    headers = request["headers"] | {"Content-Type": "application/json"}
    data = json.dumps(request["json"]).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{llm.endpoint}/chat/completions", data, headers), timeout=60
    ):
        pass


def _call_program(llm: rl.LLM, *command: str) -> None:
    variables = {
        "URL": f"{llm.endpoint}/chat/completions",
        "KEY": llm.api_key or "",
        "BODY": json.dumps(_request(llm)["json"]),
        "NODE_USE_ENV_PROXY": "1",
    }
    subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, timeout=60)


def _post(post: Callable[..., Any], llm: rl.LLM) -> None:
    post(f"{llm.endpoint}/chat/completions", timeout=60, **_request(llm)).raise_for_status()


CURL = (
    'curl -sSf "$URL" -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" --data-raw "$BODY"'
)
CLIENTS: dict[str, Callable[[rl.LLM], None]] = {
    "openai": lambda llm: _call_openai(openai.OpenAI(api_key="unused"), llm),
    "openai, created at import": lambda llm: _call_openai(EARLY, llm),
    "LLM.sync_client": lambda llm: _call_openai(llm.sync_client(), llm),
    "anthropic": _call_anthropic,
    "httpx": lambda llm: _post(httpx.post, llm),
    "httpx, created at import": lambda llm: _post(EARLY_HTTP.post, llm),
    "httpx2": lambda llm: _post(httpx2.post, llm),
    "requests": lambda llm: _post(requests.post, llm),
    "aiohttp": lambda llm: asyncio.run(_call_aiohttp(llm)),
    "urllib": _call_urllib,
}
if shutil.which("curl"):
    CLIENTS["curl"] = lambda llm: _call_program(llm, "sh", "-c", CURL)


def _node_version() -> int:
    if not shutil.which("node"):
        return 0
    shown = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(shown.removeprefix("v").partition(".")[0])


if _node_version() >= 24:
    CLIENTS["node"] = lambda llm: _call_program(llm, "node", "-e", NODE)


@rl.rollout
def proxied_agent(task: dict[str, str], llm: rl.LLM, outside: rl.LLM) -> float:
    """Call the run's model, and a model outside."""
    Path(task["folder"], "endpoint").write_text(llm.endpoint)
    for model in (llm, outside):
        CLIENTS[task["client"]](model)
    return 1.0
