"""The Tinker API and its SDK. Skipped without the SDK, unless RAYLIGHT_REQUIRE_TINKER is set."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
from tiny_models import build_model

INSTALLED = importlib.util.find_spec("tinker") is not None
if not INSTALLED and "RAYLIGHT_REQUIRE_TINKER" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "tinker_sdk":
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the base URL of a server in this process."""
    from local_server import KEY, NAME, local_server

    model = build_model("qwen3", tmp_path_factory.mktemp("qwen3"), initializer_range=0.3)
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with local_server(model, NAME, checkpoints, KEY, max_models=3, max_rank=16, kept_samplers=2) as running:
        yield running
