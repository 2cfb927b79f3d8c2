"""Requests that frameworks really send, recorded from their own packages: no engine rejects one.

The long texts in `framework_requests.jsonl` are cut.
"""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_server import DEADLINE_S, MODEL, SECRET, EngineServer

from raylight.agent.attempt_keys import attempt_key, attempt_path

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "framework_requests.jsonl").read_text().splitlines()
]
LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
FRAMEWORKS = {
    name: [*requests]
    for name, requests in itertools.groupby(RECORDED, key=lambda recorded: recorded["framework"])
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_request_of_a_framework_is_answered_and_recorded(server: EngineServer, framework: str) -> None:
    requests = FRAMEWORKS[framework]
    rollout = server.call(server.store.start_rollout("task"))
    assert rollout.attempt is not None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    headers = {"authorization": f"Bearer {attempt_key(SECRET, *ids)}"}
    base = f"http://127.0.0.1:{server.port}{attempt_path(*ids)}"

    async def send_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=headers, timeout=DEADLINE_S) as client:
            return await asyncio.gather(
                *(client.post(base + recorded["path"], json=shortened(recorded)) for recorded in requests)
            )

    answers = asyncio.run(send_all())
    rejected = [
        (recorded["path"], answer.status_code, answer.text[:300])
        for recorded, answer in zip(requests, answers, strict=True)
        if answer.status_code != 200 or '"error":{' in answer.text
    ]
    assert not rejected
    server.call(server.store.finish_attempt(rollout, "succeeded"))
    (finished,) = server.call(server.store.collect([rollout.rollout_id]))
    assert len(finished.generations) == (len(requests) if server.tokenizer else 0)


def shortened(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the body for the served model, with a short answer."""
    body = {name: value for name, value in recorded["body"].items() if name != "max_tokens"}
    return body | {"model": MODEL, LIMITS[recorded["path"]]: 8}
