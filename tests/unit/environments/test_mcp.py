"""Tools of MCP servers: real processes over stdio, and their deaths, silences and excesses."""

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from shared_services import close_shared_services

import raylight as rl
from raylight.environments import mcp
from raylight.environments.mcp import MCPTools
from raylight.errors import ConfigError, EnvironmentServerError, EnvironmentUnavailableError
from raylight.runner.outcome import classify

pytest.importorskip("mcp")
SERVER = Path(__file__).with_name("small_mcp_server.py")


def tools(how: str = "", **options: Any) -> MCPTools:
    return rl.environments.mcp_tools([sys.executable, "-S", SERVER, how], **options)


def servers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and str(SERVER) in child.cmdline()
    ]


@pytest.fixture(autouse=True)
async def nothing_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    yield
    await close_shared_services()
    assert not servers()


async def add(described: MCPTools, a: int, b: int) -> str:
    async with described.open() as opened:
        return await opened.call("add", {"a": a, "b": b})


async def test_tools_are_schemas_and_results_are_text() -> None:
    async with tools().open() as opened:
        schema = opened.schemas[0]
        assert schema["type"] == "function"
        assert schema["function"]["name"] == "add"
        assert schema["function"]["parameters"]["properties"] == {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
        }
        assert await opened.call("add", {"a": 2, "b": 3}) == "5"
        assert await opened.call("add", '{"a": 2, "b": 40}') == "42"
        assert await opened.call("count", "") == '{"calls": 3}'
        assert await opened.call("environment", {"name": "NOT_SET"}) == ""


async def test_mistakes_and_errors_of_tools_are_text_for_the_model() -> None:
    async with tools().open() as opened:
        assert await opened.call("fail", {}) == "error: it is broken"
        assert (await opened.call("subtract", {})).startswith(
            "error: there is no tool 'subtract'; the tools are: add"
        )
        assert (await opened.call("add", "{")).startswith("error: the arguments are not JSON")
        assert await opened.call("add", "[1, 2]") == "error: the arguments are not a JSON object"
        assert await opened.call("add", "null") == "error: the arguments are not a JSON object"
        for half in ('{"name": "a\\ud83d"}', {"name": "a\ud83d"}):  # the server was lost
            assert await opened.call("environment", half) == ""


async def test_all_calls_of_a_message_are_answered_in_their_order() -> None:
    def call(name: str, arguments: str) -> Any:
        function = SimpleNamespace(name=name, arguments=arguments)
        return SimpleNamespace(id=f"call_{arguments}", type="function", function=function)

    message = SimpleNamespace(tool_calls=[call("add", '{"a": 1, "b": 1}'), call("add", '{"a": 2, "b": 2}')])
    async with tools().open() as opened:
        assert await opened.answer(message) == [
            {"role": "tool", "tool_call_id": 'call_{"a": 1, "b": 1}', "content": "2"},
            {"role": "tool", "tool_call_id": 'call_{"a": 2, "b": 2}', "content": "4"},
        ]
        assert await opened.answer(SimpleNamespace(tool_calls=None)) == []


async def test_a_long_result_is_cut() -> None:
    async with tools(max_result=100).open() as opened:
        result = await opened.call("flood", {"size": 2_000_000})
    assert result == "x" * 100 + "\n[cut: 2000000 characters, 100 shown]"


async def test_the_rollouts_of_a_runner_share_one_server() -> None:
    described = tools()
    assert await asyncio.gather(*(add(described, number, 1) for number in range(20))) == [
        str(number + 1) for number in range(20)
    ]
    assert len(servers()) == 1
    assert await add(pickle.loads(pickle.dumps(described)), 1, 1) == "2"
    assert len(servers()) == 1


async def test_each_rollout_may_have_a_server_of_its_own() -> None:
    described = tools(scope="rollout")
    async with described.open() as one, described.open() as other:
        assert len(servers()) == 2
        assert await one.call("count", {}) == await other.call("count", {}) == '{"calls": 1}'
    assert not servers()


async def test_a_server_that_dies_is_reported_and_replaced() -> None:
    described = tools()
    async with described.open() as opened, described.open() as other:
        with pytest.raises(
            EnvironmentUnavailableError, match=r"was lost in a call: .*Connection closed"
        ) as caught:
            await opened.call("die", {})
        with pytest.raises(EnvironmentUnavailableError, match="was lost in a call"):
            await other.call("add", {"a": 1, "b": 1})
    assert classify(caught.value) == "infrastructure"
    assert await add(described, 1, 1) == "2"


async def test_a_slow_tool_is_an_error_for_the_model() -> None:
    described = tools(call_timeout_s=0.2)
    async with described.open() as opened:
        assert await opened.call("hang", {}) == "error: the tool did not finish within 0.2 s"
    async with described.open() as opened:
        assert len(servers()) == 1, "the server is still in use"


async def test_a_server_that_does_not_respond_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "PROBE_S", 0.2)
    async with tools(call_timeout_s=0.2).open() as opened:
        with pytest.raises(EnvironmentUnavailableError, match=r"was lost in a call: .*timed out"):
            await opened.call("freeze", {})


async def test_a_result_that_is_none_is_a_typed_error() -> None:
    async with tools().open() as opened:
        with pytest.raises(EnvironmentServerError, match="with something else than a result"):
            await opened.call("nonsense", {})


async def test_a_server_that_does_not_list_its_tools_is_reported() -> None:
    with pytest.raises(EnvironmentUnavailableError, match=r"did not list its tools within 0\.5 s"):
        await add(tools("mute", start_timeout_s=0.5), 1, 1)
    assert not servers()


async def test_a_server_that_ends_is_reported_each_time() -> None:
    described = rl.environments.mcp_tools([sys.executable, "-c", "raise SystemExit(1)"])
    for _ in range(2):
        with pytest.raises(EnvironmentUnavailableError, match=r"did not start: .*Connection closed"):
            await add(described, 1, 1)


async def test_a_program_that_does_not_exist_is_an_error_that_is_not_retried() -> None:
    with pytest.raises(EnvironmentServerError, match=r"cannot be started.*No such file") as caught:
        await add(rl.environments.mcp_tools(["/nonexistent/server"]), 1, 1)
    assert classify(caught.value) == "agent"


async def test_a_url_without_a_server_is_reported() -> None:
    with pytest.raises(EnvironmentUnavailableError, match=r"http://127\.0\.0\.1:9/mcp did not start"):
        await add(rl.environments.mcp_tools("http://127.0.0.1:9/mcp"), 1, 1)


HTTP_SERVER = """
import sys
from mcp.server.mcpserver import Context, MCPServer
server = MCPServer("adder")
@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
@server.tool()
def key(context: Context) -> str:
    "Return the key of the request."
    return context.request_context.request.headers["x-key"]
server.run("streamable-http", port=int(sys.argv[1]))
"""


@pytest.mark.slow
async def test_a_real_server_over_http_and_its_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HTTP_SERVER, str(port), stderr=subprocess.PIPE
    )
    try:
        assert server.stderr
        while b"running on" not in (line := await server.stderr.readline()):
            assert line, "the server ended"
        described = rl.environments.mcp_tools(f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "secret"})
        async with described.open() as opened:
            assert [schema["function"]["name"] for schema in opened.schemas] == ["add", "key"]
            assert opened.schemas[0]["function"]["description"] == "Add two numbers."
            assert await opened.call("add", {"a": 2, "b": 3}) == "5"
            assert await opened.call("key", {}) == "secret"
            assert (await opened.call("add", {"a": "two"})).startswith("error: ")
            server.kill()
            await server.wait()
            with pytest.raises(EnvironmentUnavailableError, match="was lost in a call"):
                await opened.call("add", {"a": 2, "b": 3})
        with pytest.raises(EnvironmentUnavailableError, match="did not start"):
            await add(described, 1, 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()


async def test_lines_that_are_no_messages_are_skipped() -> None:
    assert await add(tools("garbage"), 1, 1) == "2"


async def test_a_server_that_ignores_its_end_is_killed() -> None:
    async with tools("deaf", scope="rollout").open() as opened:
        assert await opened.call("add", {"a": 1, "b": 1}) == "2"
    assert not servers()


async def test_commands_have_the_environment_and_folder_of_their_description(tmp_path: Path) -> None:
    async with tools(env={"COLOUR": "blue"}, cwd=tmp_path).open() as opened:
        assert await opened.call("environment", {"name": "COLOUR"}) == "blue"
        assert servers()[0].cwd() == str(tmp_path)


async def test_errors_of_the_rollout_are_left_alone() -> None:
    with pytest.raises(KeyError):
        async with tools().open():
            raise KeyError("mine")
    assert len(servers()) == 1


async def test_two_servers_give_their_tools_together_unless_names_collide() -> None:
    command = [sys.executable, "-S", SERVER]
    with pytest.raises(ConfigError, match="both have a tool 'add'"):
        async with rl.environments.mcp_tools(command, [*command, ""]).open():
            pass


@pytest.mark.parametrize("server", ["server.py", [], [1], b"http://x", "ftp://x"])
def test_what_is_no_server_is_refused(server: Any) -> None:
    with pytest.raises(ConfigError, match="neither a command nor a URL"):
        rl.environments.mcp_tools(server)


def test_other_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no server is given"):
        rl.environments.mcp_tools()
    with pytest.raises(ConfigError, match="scope='cluster' is unknown"):
        rl.environments.mcp_tools(["server"], scope="cluster")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'raylight\[mcp\]'"):
        rl.environments.mcp_tools(["server"])


def test_servers_end_with_a_process_that_is_killed() -> None:
    code = f"""
import asyncio, sys
import raylight as rl
async def main():
    async with rl.environments.mcp_tools([sys.executable, "-S", {str(SERVER)!r}, "deaf"]).open():
        print("there", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert runner.stdout
    assert runner.stdout.readline() == "there\n"
    (server,) = psutil.Process(runner.pid).children()
    runner.kill()
    runner.wait()
    runner.stdout.close()
    server.wait(timeout=30)


async def test_a_server_outlives_a_cancelled_rollout() -> None:
    described, calling = tools(), asyncio.Event()

    async def rollout() -> None:
        async with described.open() as opened:
            calling.set()
            await opened.call("hang", {})

    rollouts = asyncio.create_task(rollout())
    await calling.wait()
    rollouts.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollouts
    assert await add(described, 1, 1) == "2"
    assert len(servers()) == 1
