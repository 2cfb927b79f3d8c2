"""Real harnesses with a small model that has learned one conversation of theirs: engine, tokens and tools.

A scripted model has the conversation with the harness; the small one learns it, and has it once more. The
harness's own prompts and tools are rendered, sampled from and recorded by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from engine_server import MODEL
from harness_helpers import REPAIR, TASK, agent_of, needs
from scripted_repairer import HarnessServer, RepairServer

import raylight as rl
from raylight.engines.protocol import Engine
from raylight.experience.trajectory import build_trajectories
from raylight.starter.tokenizer import MODEL_LENGTH
from raylight.traces.rewards import find_final_reward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 120
"""Training steps, after which the model repeats the conversation."""
MOST_CALLS = 6
"""Calls of a rollout of a model that does not repeat it exactly."""


class SmallServer(HarnessServer):
    """Gateway in front of a starter model with its whole context."""

    async def _engine(self, path: str) -> Engine:
        from raylight.engines.transformers.engine import TransformersEngine

        return TransformersEngine(path, MODEL, slots=2, max_model_len=MODEL_LENGTH)


@pytest.fixture(scope="module")
def scripted() -> Iterator[RepairServer]:
    with closing(RepairServer(REPAIR)) as server:
        yield server


@pytest.mark.parametrize("preset", ["codex", "opencode", "mini-swe-agent"])
def test_a_small_model_drives_a_harness(scripted: RepairServer, preset: str, tmp_path: Path) -> None:
    needs(preset)
    scripted.roll_out(TASK, agent_of(preset))
    last = scripted.requests[-1]
    shown = {"messages": [*last["messages"], scripted.message(last)], "tools": last["tools"]}
    rl.make_starter(messages=[shown], output=tmp_path / "model", steps=STEPS, accuracy=1.0, report=None)
    with closing(SmallServer("transformers", str(tmp_path / "model"))) as small:
        agent = agent_of(preset, scores_failures=True, max_context_tokens=MODEL_LENGTH)
        own, finished = small.roll_out(TASK, agent)
    calls = finished.generations
    built = build_trajectories(calls)
    print(
        preset, len(calls), [len(call.prompt_ids) for call in calls], len(built.rows), find_final_reward(own)
    )
    assert 1 <= len(calls) <= MOST_CALLS
    assert find_final_reward(own) is not None
    assert all(len(call.output_ids) == len(call.logprobs) for call in calls)
    assert len(built.rows) == 1  # each prompt continues the tokens of the call before it
