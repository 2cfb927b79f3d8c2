"""The agent of docs/mcp.md calls a real MCP server, and learns to use it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import DOCS, snippet, write_files
from learning import learn
from ray_cluster import Cluster
from scripted_model import scripted_model
from shared_services import close_shared_services

import raylight as rl
from raylight.quickstart import TOOL_MODEL

PAGE = DOCS / "mcp.md"


def agent_of_page(folder: Path) -> Any:
    write_files(PAGE, folder)
    shown = snippet(PAGE, "agent")
    return replace(shown, code=shown.code.replace("/home/me/agent", str(folder))).run()["agent"]


@pytest.mark.slow
async def test_the_agent_of_the_page_answers_with_the_tool(tmp_path: Path) -> None:
    agent = agent_of_page(tmp_path)
    with scripted_model() as url:
        assert await agent({"a": 12, "b": 30}, rl.LLM(endpoint=url, model="scripted")) == 1.0
    await close_shared_services()


@pytest.mark.slow
def test_the_agent_of_the_page_learns(cluster: Cluster, tmp_path: Path) -> None:
    learning = learn(agent_of_page(tmp_path), TOOL_MODEL, tmp_path / "run", steps=8)
    assert learning.failures == []
    assert learning.before < 0.75
    assert learning.after > learning.before + 0.1
