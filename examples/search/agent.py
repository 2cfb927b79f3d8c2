"""The agent, with the OpenAI Agents SDK: it searches a corpus, and answers with a word of what it found."""

from __future__ import annotations

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from corpus import BM25, make_facts

import raylight as rl

INSTRUCTIONS = "Search, then answer with one word."
CORPUS = BM25([fact.text for fact in make_facts()])
MAX_TURNS = 3
QUIET = RunConfig(tracing_disabled=True)
"""Keeps the SDK from sending its traces to OpenAI."""


@function_tool
def search(query: str) -> str:
    """Find the fact that fits some words best."""
    return "\n".join(CORPUS.search(query)) or "nothing"


@rl.rollout
async def look_up(task: dict[str, Any], llm: rl.LLM) -> float:
    """Return 1 if the answer is the task's, and 0 otherwise.

    Args:
        task: `question` and `answer`.
    """
    agent = Agent(
        name="look_up",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel(model=llm.model, openai_client=llm.client()),
        model_settings=ModelSettings(max_tokens=64, **llm.sampling_parameters),
        tools=[search],
    )
    try:
        done = await Runner.run(agent, task["question"], max_turns=MAX_TURNS, run_config=QUIET)
    except (MaxTurnsExceeded, ModelBehaviorError):  # the latter: it called an unknown tool
        return 0.0
    return float(str(done.final_output).strip(" .\n").lower() == task["answer"])
