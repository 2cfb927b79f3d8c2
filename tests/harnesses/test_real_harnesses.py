"""Real harnesses against the gateway: each preset edits a file, and is judged by tests that enter afterwards.

Needs the harnesses: `npm install -g @openai/codex opencode-ai @anthropic-ai/claude-code @qwen-code/qwen-code`
and `pip install mini-swe-agent mcp`. One that is missing is skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from engine_server import MODEL
from scripted_repairer import TIMEOUT_S, RepairServer

import raylight as rl
from raylight.harnesses.presets import PRESETS
from raylight.semconv import DIALECT, PROMPT_SOURCE
from raylight.traces.rewards import find_final_reward

pytestmark = pytest.mark.slow
TASK = {
    "prompt": "total in shop.py returns a - b. It must return a + b.",
    "files": {"shop.py": "def total(a, b):\n    return a - b\n"},
}
TESTS = {"check.py": "from shop import total\n\nassert total(7, 2) == 9\n"}
REPAIR = "sed -i 's|a - b|a + b|' shop.py"
DIALECTS = {"codex": "responses", "claude-code": "messages"}
"""Dialects of presets that do not call chat completions."""


def needs(preset: str) -> None:
    program = PRESETS[preset].command[0]
    if shutil.which(program) is None:
        if os.environ.get("RAYLIGHT_REQUIRE_HARNESSES") == "1":
            raise pytest.UsageError(f"RAYLIGHT_REQUIRE_HARNESSES=1, but there is no program {program}")
        pytest.skip(f"{program} is not installed: {PRESETS[preset].install}")


@pytest.fixture(scope="module")
def server() -> Iterator[RepairServer]:
    server = RepairServer(REPAIR)
    yield server
    server.close()


def agent_of(preset: str, **options: Any) -> rl.CommandAgent:
    judge = rl.RewardCommand(["python3", "check.py"], files=TESTS)
    return rl.CommandAgent(
        preset=preset, reward=judge, timeout_s=TIMEOUT_S, max_output_tokens=1024, **options
    )


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
