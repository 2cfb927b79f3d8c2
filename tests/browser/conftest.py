"""A real browser before the pages of a recorded run.

Needs Chromium and its driver (Debian: chromium, chromium-driver) and selenium; without them the tests are
skipped, unless RAYLIGHT_REQUIRE_BROWSER is set.
"""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from browser_pages import TIMEOUT_S, Pages
from chromium import missing, open_chromium
from recorded_run import Recorded, record_run

from raylight.quickstart import STARTER_MODEL
from raylight.trainer.output.ui_process import ui_process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser" in item.nodeid:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if (name := missing()) is not None:
        message = f"{name} is missing; apt-get install chromium chromium-driver, pip install selenium"
        if os.environ.get("RAYLIGHT_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    opened = open_chromium(tmp_path_factory.mktemp("profile"))
    opened.set_script_timeout(TIMEOUT_S)
    yield opened
    opened.quit()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Recorded]]:
    folder = tmp_path_factory.mktemp("outputs")
    for name in ("run", "other"):
        recorded = asyncio.run(record_run(folder / name))
        (recorded.folder / "model").symlink_to(STARTER_MODEL)
    settings = folder / "other" / "config.yaml"
    settings.write_text(settings.read_text().replace("lr: 0.1", "lr: 0.2"))
    with ui_process(folder, print) as address:
        yield address.result(TIMEOUT_S), Recorded(folder / "run")


@pytest.fixture
def pages(chromium: Any, served: tuple[str, Recorded]) -> Pages:
    chromium.set_window_size(1280, 900)
    opened = Pages(chromium, *served)
    opened.errors()
    return opened
