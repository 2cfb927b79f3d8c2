"""Fixtures of the documentation tests."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from framework_agents import Environments


@pytest.fixture(scope="session")
def environments() -> Iterator[Environments]:
    """Virtual environments of frameworks, removed after the session."""
    with TemporaryDirectory(prefix="raylight-envs-") as folder:
        yield Environments(Path(folder))
