"""Real harnesses against the gateway: each preset edits a file, and is judged by tests that enter afterwards.

Needs the harnesses: `npm install -g @openai/codex opencode-ai @anthropic-ai/claude-code @qwen-code/qwen-code`
and `pip install mini-swe-agent mcp`. One that is missing is skipped.
"""

import pytest
from engine_server import MODEL
from harness_helpers import TASK, TESTS, agent_of, needs
from scripted_repairer import RepairServer

from raylight.harnesses.presets import PRESETS
from raylight.semconv import DIALECT, PROMPT_SOURCE, RESPONSE_ID
from raylight.traces.reward_spans import find_final_reward

pytestmark = pytest.mark.slow
DIALECTS = {"codex": "responses", "claude-code": "messages"}
"""Dialects of presets that do not call chat completions."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_harness_repairs_a_module(server: RepairServer, preset: str) -> None:
    needs(preset)
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), server.proxy)
    own, finished = server.roll_out(TASK, agent_of(preset, env={} if preset == "qwen-code" else proxies))
    assert server.proxied == []  # no update, telemetry, list of models or login was asked for
    assert find_final_reward(own) == 1.0
    calls = [span for span in finished.spans if PROMPT_SOURCE in span.attributes]
    assert {span.attributes[DIALECT] for span in calls} == {DIALECTS.get(preset, "chat")}
    # without calls for titles, summaries or the like
    assert len(calls) == len(server.requests) == 2
    assert all(request["model"] == MODEL for request in server.requests)
    assert server.requests[1]["messages"][-1]["role"] == "tool"
    prompt = str(server.requests[0]["messages"])
    assert TASK["prompt"] in prompt
    assert TESTS["check.py"] not in prompt


@pytest.mark.parametrize("silent_at", [0, 1])
def test_codex_waits_for_a_stream_that_is_silent_for_longer_than_it_allows(
    server: RepairServer, silent_at: int
) -> None:
    needs("codex")
    idle = "model_providers.raylight.stream_idle_timeout_ms=2500"
    command = [*PRESETS["codex"].command[:-1], "-c", idle, "-"]
    server.silence_s, server.silent_at = 6.0, silent_at
    try:
        own, finished = server.roll_out(TASK, agent_of("codex", command=command))
    finally:
        server.silence_s, server.silent_at = 0.0, 1
    assert find_final_reward(own) == 1.0
    assert len(server.requests) == 2  # without a retry
    calls = [span for span in finished.spans if PROMPT_SOURCE in span.attributes]
    assert len({span.attributes[RESPONSE_ID] for span in calls}) == (2 if silent_at == 0 else 1)
