"""Gateways for a test."""

import pytest
from gateway_helpers import Site


@pytest.fixture
def site() -> Site:
    return Site()
