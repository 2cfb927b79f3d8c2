"""The option that selects packages, and the table of the results at the end of the tests."""

import pytest
from crowd import HEADER, selected_package


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crowd-part",
        metavar="HASH",
        help="take one of the packages, selected by this hexadecimal commit hash",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (commit := config.getoption("--crowd-part")):
        return
    name = f"test_a_run_beside[{selected_package(commit)}]"
    kept = [item for item in items if item.get_closest_marker("slow") is None or item.name == name]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    rows = [
        value
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "row" and report.when == "call"
    ]
    if rows:
        terminalreporter.section("crowd")
        terminalreporter.write_line("\n".join([HEADER, *rows]))
