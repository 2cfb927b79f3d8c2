"""The options that select runs and random moments, and the table of all faults at the end of the tests."""

import pytest
from chaos_runs import CI
from chaos_table import format_table


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "runs under faults, of tests/chaos; -k NAME selects some")
    group.addoption(
        "--ci-faults", metavar="HASH", help="take only a pair of runs, selected by this commit hash"
    )
    group.addoption("--alone", action="store_true", help="inject each fault in a separate run")
    group.addoption("--chaos-seed", default="0", help="seed of the moments of faults at random moments")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (commit := config.getoption("--ci-faults")):
        return
    pair = CI[int(commit, 16) % len(CI)]
    kept = [item for item in items if item.name in {f"test_run[{name}]" for name in pair}]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    results = [
        value
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "result" and report.when == "call"
    ]
    if results:
        terminalreporter.section("faults")
        terminalreporter.write_line(format_table(results))
