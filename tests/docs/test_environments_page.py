"""The agents of docs/environments.md play with a scripted model, and learn."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import DOCS, snippet, write_files
from learning import learn
from ray_cluster import Cluster
from scripted_model import scripted_model
from shared_services import close_shared_services

import raylight as rl
from examples.starter_models.make import make_starter
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
    await close_shared_services()


@pytest.mark.slow("a learning run")
def test_the_class_of_the_page_learns(cluster: Cluster, tmp_path: Path) -> None:
    learning = learn(snippet(PAGE, "calculator").run()["agent"], TOOL_MODEL, tmp_path / "run", steps=8)
    assert learning.failures == []
    assert learning.after > learning.before + 0.1


@dataclass(frozen=True)
class Lesson:
    """A snippet of the page with an agent and tasks, and a starter model for it."""

    snippet: str
    package: str
    task: str
    options: dict[str, Any]
    steps: int
    gain: float
    """Difference of the rewards, less two standard errors, that is reached at least."""
    tasks_per_step: int = 16
    teaching: int | None = None
    """Steps of the starter model at most."""

    def __str__(self) -> str:
        return self.snippet


LESSONS = [
    Lesson(
        "cliff",
        "gymnasium",
        "gymnasium:CliffWalking-v1",
        {"render_mode": None},
        steps=6,
        gain=1.0,
        tasks_per_step=4,
        teaching=150,
    ),
    Lesson(
        "puzzles", "reasoning_gym", "reasoning_gym:spell_backward", {"max_word_len": 6}, steps=10, gain=0.03
    ),
    Lesson("number", "textarena", "textarena:GuessTheNumber-v0", {}, steps=6, gain=0.1, tasks_per_step=8),
]


@pytest.mark.slow("a learning run, with packages of the extra environments")
@pytest.mark.parametrize("lesson", LESSONS, ids=str)
@pytest.mark.timeout(480)
def test_a_starter_model_learns(lesson: Lesson, cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip(lesson.package)
    made = make_starter(lesson.task, tmp_path / "model", options=lesson.options, steps=lesson.teaching)
    names = snippet(PAGE, lesson.snippet).run()
    learning = learn(
        names["agent"],
        made.path,
        tmp_path / "run",
        steps=lesson.steps,
        tasks=(names["tasks"], names["val_tasks"]),
        tasks_per_step=lesson.tasks_per_step,
    )
    assert learning.failures == []
    assert learning.least_gain > lesson.gain


@pytest.mark.slow("needs a package of the extra environments")
def test_the_game_of_the_page_can_be_played() -> None:
    pytest.importorskip("textarena")
    names = snippet(PAGE, "number").run()
    assert names["agent"].display_name == "rollout function textarena_agent(GuessTheNumber-v0)"
