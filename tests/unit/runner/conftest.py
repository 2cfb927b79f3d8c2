"""The store of a test's runners."""

import pytest

from raylight.store.client import StoreClient
from raylight.store.service import StoreService


@pytest.fixture
def store() -> StoreClient:
    return StoreClient(StoreService())
