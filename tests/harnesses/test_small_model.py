"""Real harnesses with the quickstart's small model, which was not trained for them, in a short context."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from engine_server import MODEL
from harness_helpers import TASK, agent_of, needs
from scripted_repairer import HarnessServer

from raylight.engines.protocol import Engine
from raylight.quickstart import TOOL_MODEL
from raylight.traces.reward_spans import find_final_reward

pytestmark = pytest.mark.slow
CONTEXT, MAX_TURNS = 4096, 4
CALLS = {"codex": 0, "opencode": MAX_TURNS, "mini-swe-agent": 3}
"""Answered calls of each: the prompts of Codex and OpenCode do not fit. Codex ends then; OpenCode compacts
until the budget is spent. mini-swe-agent ends after three answers without a call of its tool."""


class SmallServer(HarnessServer):
    """Gateway in front of the small model."""

    async def _engine(self, path: str) -> Engine:
        from raylight.engines.transformers.engine import TransformersEngine

        return TransformersEngine(path, MODEL, slots=2, max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def server() -> Iterator[SmallServer]:
    with closing(SmallServer("transformers", TOOL_MODEL)) as server:
        yield server


@pytest.mark.parametrize("preset", CALLS)
def test_a_harness_with_the_small_model_ends(server: SmallServer, preset: str) -> None:
    needs(preset)
    agent = agent_of(preset, scores_failures=True, max_context_tokens=CONTEXT, max_output_tokens=64)
    own, finished = server.roll_out(TASK, agent, max_turns=MAX_TURNS)
    assert own[0].attributes["agentlightning.operation.output.timed_out"] is False
    assert find_final_reward(own) == 0.0
    assert len(finished.generations) == CALLS[preset]
    assert all(len(call.output_ids) == len(call.logprobs) for call in finished.generations)
