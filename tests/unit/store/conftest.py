"""A store in this process."""

from collections.abc import AsyncIterator

import pytest
from store_helpers import Box, open_box


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    async with open_box() as box:
        yield box
