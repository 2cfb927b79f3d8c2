"""Reasoning before an answer that is held to a schema, with vLLM's parser of reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine_server import TEMPLATE, EngineServer, build_tiny
from openai import OpenAI

from raylight.agent.attempt_keys import attempt_key, attempt_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
THINKING = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    path = build_tiny(tmp_path_factory.mktemp("thinker"), THINKING, ["<think>", "</think>"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        server = EngineServer("vllm", path, {"reasoning_parser": "qwen3"})
    yield server
    server.close()


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": FORMAT},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "move"}}},
    ],
    ids=["schema", "required", "named"],
)
def test_vllm_thinks_before_what_is_held_to_a_schema(server: EngineServer, how: dict[str, Any]) -> None:
    rollout = server.call(server.store.start_rollout("task"))
    assert rollout.attempt is not None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    url = f"http://127.0.0.1:{server.port}{attempt_path(*ids)}/v1"
    end = server.tokenizer.convert_tokens_to_ids("</think>")
    with OpenAI(base_url=url, api_key=attempt_key("run-secret", *ids), max_retries=0) as client:
        answer = client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=400,
            # about a hundred tokens of reasoning
            logit_bias={str(end): 4},
            **how,
        )
    server.call(server.store.finish_attempt(rollout, "succeeded"))
    (finished,) = server.call(server.store.collect([rollout.rollout_id]))
    (generation,) = finished.generations
    sampled = generation.output_ids.tolist()
    thought, rest = sampled[: sampled.index(end)], sampled[sampled.index(end) + 1 :]
    message, usage = answer.choices[0].message, answer.usage
    assert end not in rest
    assert server.tokenizer.decode(thought).strip() == (message.reasoning or "").strip()
    assert usage.completion_tokens_details.reasoning_tokens == len(thought)
    arguments = message.tool_calls[0].function.arguments if message.tool_calls else message.content
    assert json.loads(arguments)["x"] in (1, 2)
