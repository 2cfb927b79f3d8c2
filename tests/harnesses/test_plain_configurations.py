"""Codex and Claude Code with nothing but a base URL and a key: their default tools, fields and models.

`codex` reads the base URL from its configuration and the key from its own variable; `claude` reads both from
variables that each rollout has.
"""

import shutil

import pytest
from harness_helpers import TASK, TESTS, needs
from scripted_repairer import TIMEOUT_S, RepairServer

import raylight as rl
from raylight.semconv import PROMPT_SOURCE
from raylight.traces.reward_spans import find_final_reward

pytestmark = pytest.mark.slow
CODEX = (
    'CODEX_API_KEY=$OPENAI_API_KEY exec codex exec -c openai_base_url="\\"$OPENAI_BASE_URL\\"" '
    '--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$1"'
)
CLAUDE = 'IS_SANDBOX=1 exec claude -p --dangerously-skip-permissions "$1"'  # IS_SANDBOX: it may run as root
COMMANDS = {"codex": CODEX, "claude-code": CLAUDE}


@pytest.mark.parametrize("preset", COMMANDS)
def test_a_harness_works_without_a_configuration(server: RepairServer, preset: str) -> None:
    needs(preset)
    agent = rl.CommandAgent(
        ["sh", "-c", COMMANDS[preset], "sh", "{prompt}"],
        files=lambda task: task["files"],
        reward=rl.harnesses.RewardCommand([str(shutil.which("python3")), "check.py"], files=TESTS),
        timeout_s=TIMEOUT_S,
    )
    own, finished = server.roll_out(TASK, agent)
    assert find_final_reward(own) == 1.0
    calls = [span for span in finished.spans if PROMPT_SOURCE in span.attributes]
    assert len(calls) == len(server.requests) == 2
    first, second = server.requests
    assert second["messages"][-1]["role"] == "tool"
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["tools"] == first["tools"]
