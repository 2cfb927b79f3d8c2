"""The environment and the agent of docs/openenv.md, on a real server of the package openenv."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from docs_snippets import DOCS, snippet, write_files
from framework_agents import Environments, requirements
from learning import learn
from ray_cluster import Cluster, eventually, free_port
from scripted_model import scripted_model

import raylight as rl
from raylight.environments.openenv import InvalidActionError, open_session
from raylight.quickstart import STARTER_MODEL

PAGE = DOCS / "openenv.md"
START_S = 60.0
TOOL_SERVER = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction

class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("adder")

        @mcp.tool
        def add(a: int, b: int) -> int:
            "Add two numbers."
            return a + b

        super().__init__(mcp)
        self.calls = 0

    def reset(self, seed=None, episode_id=None, **options):
        return Observation(metadata={})

    def _step_impl(self, action, timeout_s=None, **options):
        return Observation()

    async def step_async(self, action, timeout_s=None, **options):
        self.calls += action.type == "call_tool"
        return await super().step_async(action, timeout_s, **options)

    @property
    def state(self):
        return State(step_count=self.calls)

app = create_app(Adder, CallToolAction, Observation, env_name="adder", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextlib.contextmanager
def serving(python: Path, script: Path) -> Iterator[str]:
    """Run a server of openenv; yield its address."""
    port = free_port()
    server = subprocess.Popen([python, "-I", script, str(port)])

    def is_up() -> bool:
        assert server.poll() is None, "the server ended"
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        eventually(is_up, START_S, "the start of the server")
        yield f"ws://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def python(environments: Environments) -> Path:
    return environments.python(requirements(PAGE))


@pytest.fixture(scope="module")
def server(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Server of the page."""
    folder = tmp_path_factory.mktemp("openenv")
    write_files(PAGE, folder)
    with serving(python, folder / "sums_server.py") as url:
        yield url


def agent_of_page(server: str) -> Any:
    shown = snippet(PAGE, "agent")
    return replace(shown, code=shown.code.replace("ws://127.0.0.1:8000", server)).run()["agent"]


@pytest.mark.slow
async def test_the_protocol_is_that_of_a_real_server(server: str) -> None:
    with scripted_model() as url:
        llm = rl.LLM(endpoint=url, model="scripted")
        assert await agent_of_page(server)({"seed": 3}, llm) == 1.0
        assert await agent_of_page(server)({"a": 12, "b": 30}, llm) == 1.0
    async with open_session(server.replace("ws", "http", 1), None, 10) as session:
        assert list((await session.action_schema())["properties"]) == ["metadata", "text"]
        first = await session.reset({"seed": 1})
        assert first == await session.reset({"seed": 1})
        with pytest.raises(InvalidActionError, match=r"text.*Field required"):
            await session.step({"answer": "1"})
        assert (await session.step({"text": "1"})).done
        assert (await session.state())["step_count"] == 1


@pytest.mark.slow
async def test_tools_of_a_real_server_are_called(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "tools.py"
    script.write_text(TOOL_SERVER)
    with serving(python, script) as server, scripted_model() as url:
        agent: Any = rl.environments.openenv_agent(
            server, prompt=lambda observation: "12+30=", reward=lambda state: state["step_count"]
        )
        assert await agent({}, rl.LLM(endpoint=url, model="scripted")) == 1.0


@pytest.mark.slow
def test_the_agent_of_the_page_learns(cluster: Cluster, server: str, tmp_path: Path) -> None:
    learning = learn(agent_of_page(server), STARTER_MODEL, tmp_path / "run", steps=10)
    assert learning.failures == []
    assert learning.before < 0.71
    assert learning.after > learning.before + 0.1
