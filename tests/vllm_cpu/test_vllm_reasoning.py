"""Reasoning before an answer that is held to a schema, with vLLM's parser of reasoning."""

import json
from collections.abc import Iterator
from pathlib import Path
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


def start(folder: Path, *markers: str) -> EngineServer:
    path = build_tiny(folder, THINKING, ["<think>", "</think>", *markers])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        return EngineServer("vllm", path, {"reasoning_parser": "qwen3"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    server = start(tmp_path_factory.mktemp("thinker"))
    yield server
    server.close()


def ask(server: EngineServer, bias: dict[str, float], **how: Any) -> tuple[Any, list[int]]:
    """Return an answer and its sampled tokens."""
    rollout = server.call(server.store.start_rollout("task"))
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    words = {str(server.tokenizer.convert_tokens_to_ids(word)): value for word, value in bias.items()}
    url = f"http://127.0.0.1:{server.port}{attempt_path(*ids)}/v1"
    with OpenAI(base_url=url, api_key=attempt_key("run-secret", *ids), max_retries=0) as client:
        answer = client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=400,
            logit_bias=words,
            **how,
        )
    server.call(server.store.finish_attempt(rollout, "succeeded"))
    (finished,) = server.call(server.store.collect([rollout.rollout_id]))
    (generation,) = finished.generations
    return answer, generation.output_ids.tolist()


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
    end = server.tokenizer.convert_tokens_to_ids("</think>")
    answer, sampled = ask(server, {"</think>": 4}, **how)  # about a hundred tokens of reasoning
    thought, rest = sampled[: sampled.index(end)], sampled[sampled.index(end) + 1 :]
    message, usage = answer.choices[0].message, answer.usage
    assert end not in rest
    assert server.tokenizer.decode(thought).strip() == (message.reasoning or "").strip()
    assert usage.completion_tokens_details.reasoning_tokens == len(thought)
    arguments = message.tool_calls[0].function.arguments if message.tool_calls else message.content
    assert json.loads(arguments)["x"] in (1, 2)


def test_vllm_holds_strict_tools_to_their_schema_after_the_thought(tmp_path: Path) -> None:
    """The choice is automatic. A call ends the thought, as its end does."""
    server = start(tmp_path, "<tool_call>", "</tool_call>")
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    answer, sampled = ask(server, {"</think>": 1, "<tool_call>": 2}, tools=[strict])
    ends = {server.tokenizer.convert_tokens_to_ids(word) for word in ("</think>", "<tool_call>")}
    first = next(place for place, token in enumerate(sampled) if token in ends)
    thought, rest = (
        server.tokenizer.decode(part, skip_special_tokens=True) for part in (sampled[:first], sampled[first:])
    )
    server.close()
    assert thought
    assert answer.choices[0].message.reasoning.strip() == thought.replace("<think>", "").strip()
    calls = [text.partition("</tool_call>") for text in rest.split("<tool_call>")[1:]]
    whole = [json.loads(call) for call, end, _ in calls if end]
    assert whole
    assert all(call["arguments"]["x"] in (1, 2) for call in whole)
