"""The calculator as a real MCP server over stdio: answers, sharing between rollouts, and crashes."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from math_helpers import SERVER, Script, ScriptedModel, calling, logging_command, solving, text_of

import raylight as rl
from examples.math_agent import calculator as module
from examples.math_agent.agent import math_agent
from examples.math_agent.answers import EXTRACTORS
from examples.math_agent.calculator import CalculatorError, calculator, close_all
from examples.math_agent.clients import CLIENTS, find_client
from examples.math_agent.config import CALCULATOR_COMMAND, MathSettings

QUESTION = "What is 6*7?"


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    yield
    await close_all()
    assert not servers()


def servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if str(SERVER) in child.cmdline()]


async def calculate(expression: str) -> str:
    async with calculator(CALCULATOR_COMMAND) as tools:
        return await tools.call("calculate", {"expression": expression})


async def test_it_calculates_and_rejects_over_mcp(tmp_path: Path) -> None:
    async with calculator(logging_command(tmp_path / "log")) as tools:
        assert [tool.name for tool in tools.tools] == ["calculate"]
        assert await tools.call("calculate", {"expression": "2*(3+4)"}) == "14"
        assert "4096 bits" in await tools.call("calculate", {"expression": "9**9**9**9"})
        assert "not allowed" in await tools.call("calculate", {"expression": "__import__('os')._exit(1)"})
        assert "Field required" in await tools.call("calculate", {"text": "1"})
        assert await tools.call("compute", {}) == "error: there is no tool 'compute'; there are: calculate"
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [call["result"] for call in logged] == ["14", None, None]


@pytest.mark.slow
async def test_one_server_serves_all_rollouts_of_a_process() -> None:
    assert await asyncio.gather(*(calculate(f"{number}+1") for number in range(20))) == [
        str(number + 1) for number in range(20)
    ]
    with pytest.raises(KeyError):
        async with calculator(CALCULATOR_COMMAND):
            raise KeyError("errors of the block are left alone")
    assert len(servers()) == 1


async def test_a_server_that_dies_is_reported_and_replaced() -> None:
    async with calculator(CALCULATOR_COMMAND):
        (server,) = servers()
    server.kill()
    with pytest.raises(CalculatorError, match="was lost in a call: Connection closed"):
        await calculate("1")
    assert await calculate("1+1") == "2"
    assert server.pid not in [one.pid for one in servers()]


@pytest.mark.slow
async def test_a_server_lost_by_one_rollout_is_lost_for_the_others_too() -> None:
    async def calculate_late() -> None:
        async with calculator(CALCULATOR_COMMAND) as tools:
            opened.set()
            await lost.wait()
            await tools.call("calculate", {"expression": "1"})

    opened, lost = asyncio.Event(), asyncio.Event()
    late = asyncio.create_task(calculate_late())
    await opened.wait()
    servers()[0].kill()
    with pytest.raises(CalculatorError, match="was lost in a call: Connection closed"):
        await calculate("1")
    lost.set()
    with pytest.raises(CalculatorError, match="was lost in a call: Connection closed"):
        await late


@pytest.mark.slow
async def test_a_server_that_does_not_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_S", 4.0)  # includes its start
    async with calculator(CALCULATOR_COMMAND):
        servers()[0].suspend()
    with pytest.raises(CalculatorError, match=r"was lost in a call: .*[Tt]imed out"):
        await calculate("1")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nonexistent/calculator",), "No such file"),
        ((sys.executable, "-c", "raise SystemExit(1)"), "Connection closed"),
    ],
)
async def test_a_server_that_does_not_start_is_reported(command: tuple[str, ...], why: str) -> None:
    for _ in range(2):  # later users get the same error
        with pytest.raises(CalculatorError, match=f"did not start.*{why}"):
            async with calculator(command):
                pass


@pytest.mark.slow
def test_a_server_ends_when_the_process_that_started_it_is_killed() -> None:
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from examples.math_agent.calculator import calculator\n"
        "from examples.math_agent.config import CALCULATOR_COMMAND\n"
        "async def main():\n"
        "    async with calculator(CALCULATOR_COMMAND):\n"
        "        print('there', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code, str(SERVER.parents[2])], stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout
    assert runner.stdout.readline() == "there\n"
    (server,) = psutil.Process(runner.pid).children()
    runner.kill()
    runner.wait()
    runner.stdout.close()
    server.wait(timeout=30)


# agent loops of the client libraries, without Ray

CLIENT_PARAMETERS = [
    client if client == "openai" else pytest.param(client, marks=pytest.mark.framework(client))
    for client in CLIENTS
]
"""The clients; each but "openai" has the name of the module that it needs."""


async def run_agent(client: Any, script: Script, max_turns: int = 4) -> tuple[str, ScriptedModel]:
    with ScriptedModel(script) as model:
        llm = rl.LLM(
            endpoint=model.url, model="scripted", sampling_parameters={"temperature": 0.5, "max_tokens": 64}
        )
        return await find_client(client)(
            QUESTION, llm, MathSettings(client=client, max_turns=max_turns)
        ), model


@pytest.mark.parametrize("client", CLIENT_PARAMETERS)
async def test_sampling_parameters_and_instructions_reach_the_model(client: str) -> None:
    answer_text, model = await run_agent(client, solving({QUESTION: "6*7"}))
    assert answer_text.endswith("### 42")
    for request in model.requests:
        assert request["temperature"] == 0.5
        assert request.get("max_tokens", request.get("max_completion_tokens")) == 64
        assert "###" in text_of(request["messages"][0])
        assert request["messages"][0]["role"] == "system"


MARKED = {
    "hashes": "### 42",
    "answer_tag": "### ANSWER: 42 ###",
    "four_hashes": "#### 42",
    "last_number": "Six times 7 is 42.",
}


@pytest.mark.slow
@pytest.mark.parametrize("extractor", EXTRACTORS)
async def test_the_agent_asks_for_and_reads_the_mark_of_its_settings(extractor: Any) -> None:
    with ScriptedModel(lambda messages, tools: {"content": MARKED[extractor]}) as model:
        llm, task = rl.LLM(endpoint=model.url, model="scripted"), {"question": QUESTION, "result": "42"}
        assert await math_agent(task, llm, MathSettings(extractor=extractor)) == 1.0
        other: Any = "four_hashes" if extractor != "four_hashes" else "hashes"
        assert await math_agent(task, llm, MathSettings(extractor=other)) == 0.0
    prompts = [text_of(request["messages"][0]) for request in model.requests]
    assert [
        EXTRACTORS[name].instruction in text for name, text in zip((extractor, other), prompts, strict=True)
    ] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENT_PARAMETERS)
async def test_a_model_that_never_stops_calling_is_stopped(client: str) -> None:
    def endless(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        return calling("1+1")(tools) if tools else {"content": "no tools left"}

    answer_text, model = await run_agent(client, endless)
    assert "###" not in answer_text
    assert len(model.requests) == 4


MISTAKES = [
    calling("9**9**9"),
    calling("1", name="compute"),
    calling("1", arguments="{]"),
    calling("1", arguments="[1]"),
]


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENT_PARAMETERS)
async def test_mistakes_of_the_model_do_not_raise(client: str) -> None:
    """The model receives the error or the rollout ends without an answer. The agent never raises."""
    for mistake in MISTAKES:

        def answer(
            messages: list[dict[str, Any]], tools: list[dict[str, Any]], mistake: Any = mistake
        ) -> dict[str, Any]:
            last = messages[-1]
            return mistake(tools) if last["role"] != "tool" else {"content": f"### {text_of(last)}"}

        answer_text, _ = await run_agent(client, answer)
        assert answer_text == "" or "rror" in answer_text


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples.math_agent.clients.langgraph_sdk", "langgraph.graph"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "langgraph.graph", None)
    with pytest.raises(rl.errors.ConfigError, match="pip install langgraph langchain-openai mcp"):
        find_client("langgraph")
    with pytest.raises(rl.errors.ConfigError, match="choose one of openai, agent_framework"):
        find_client("crewai")
