"""The agents of docs/environments.md play with a scripted model, and learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import DOCS, snippet, write_files
from learning import learn
from ray_cluster import Cluster
from scripted_model import scripted_model

import raylight as rl
from raylight.environments.mcp_connection import close_shared_connections
from raylight.quickstart import TOOL_MODEL

PAGE = DOCS / "environments.md"


async def test_the_class_of_the_page_is_an_agent() -> None:
    agent = snippet(PAGE, "calculator").run()["agent"]
    with scripted_model() as url:
        llm = rl.LLM(endpoint=url, model="scripted")
        task = {"a": 12, "b": 30, "prompt": "12+30= "}
        assert await agent(task, llm) == {"primary": 1.0}
        assert await agent({**task, "b": 31}, llm) == {"primary": 0.0}


async def test_the_loop_of_the_page_uses_mcp(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    write_files(DOCS / "mcp.md", tmp_path)
    shown = snippet(PAGE, "loop")
    agent = replace(shown, code=shown.code.replace("/home/me/agent", str(tmp_path))).run()["agent"]
    with scripted_model() as url:
        assert await agent({"a": 12, "b": 30}, rl.LLM(endpoint=url, model="scripted")) == 1.0
    await close_shared_connections()


@pytest.mark.slow("a learning run")
def test_the_class_of_the_page_learns(cluster: Cluster, tmp_path: Path) -> None:
    learning = learn(snippet(PAGE, "calculator").run()["agent"], TOOL_MODEL, tmp_path / "run", steps=8)
    assert learning.failures == []
    assert learning.after > learning.before + 0.1


@pytest.mark.slow("a learning run, with packages of the extra environments")
@pytest.mark.parametrize(
    ("name", "package", "task", "settings", "steps", "gain"),
    [
        ("lake", "gymnasium", "gymnasium:FrozenLake-v1", {"is_slippery": False}, 8, 0.3),
        ("puzzles", "reasoning_gym", "reasoning_gym:spell_backward", {"max_word_len": 6}, 10, 0.2),
    ],
)
def test_a_starter_model_learns(
    name: str,
    package: str,
    task: str,
    settings: dict[str, Any],
    steps: int,
    gain: float,
    cluster: Cluster,
    tmp_path: Path,
) -> None:
    pytest.importorskip(package)
    made = rl.make_starter(task, tmp_path / "model", options=settings)
    names = snippet(PAGE, name).run()
    tasks = (names["tasks"], names["val_tasks"])
    learning = learn(names["agent"], made.path, tmp_path / "run", steps=steps, tasks=tasks)
    assert learning.failures == []
    assert learning.after > learning.before + gain


@pytest.mark.slow("needs a package of the extra environments")
def test_the_game_of_the_page_can_be_played() -> None:
    pytest.importorskip("textarena")
    names = snippet(PAGE, "number").run()
    assert names["agent"].display_name == "rollout function textarena_agent(GuessTheNumber-v0)"
