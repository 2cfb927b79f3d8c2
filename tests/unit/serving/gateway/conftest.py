"""Gateways for a test."""

from collections.abc import Iterator

import pytest
from gateway_helpers import Replica, Site
from scripted_models import listening


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Replica, str]]:
    """Serve a scripted model behind a gateway; yields it and its address."""
    replica = Replica()
    with listening(replica.app) as address:
        yield replica, address


@pytest.fixture
def address(served: tuple[Replica, str]) -> str:
    return served[1]
