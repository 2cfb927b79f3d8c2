"""Fixtures of tests that kill drivers."""

from collections.abc import Iterator

import pytest
from ray_cluster import kill_orphaned_proxies, ray_processes


@pytest.fixture
def kill_leftover_proxies(no_processes_left: None) -> Iterator[None]:
    """Kill the HAProxy processes that Ray leaves behind if a driver and its local cluster are killed."""
    before = ray_processes(("haproxy",))
    yield
    kill_orphaned_proxies(before)
