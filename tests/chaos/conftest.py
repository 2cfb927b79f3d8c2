"""The option that selects the faults of CI, and the table of all faults at the end of the tests."""

from collections.abc import Callable

import pytest
from chaos_experiment import Row, format_table
from chaos_faults import CI

ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "faults of tests/chaos; -k NAME selects one")
    group.addoption("--ci-faults", action="store_true", help=f"inject only {', '.join(CI)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--ci-faults"):
        return
    kept = [item for item in items if any(item.name == f"test_fault[{name}]" for name in CI)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture
def record_row(pytestconfig: pytest.Config) -> Callable[[Row], None]:
    """Add a row to the table."""
    return pytestconfig.stash.setdefault(ROWS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash.get(ROWS, []):
        terminalreporter.section("faults")
        terminalreporter.write_line(format_table(rows))
