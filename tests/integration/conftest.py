"""Fixtures of tests that kill drivers."""

from collections.abc import Iterator

import pytest
from ray_cluster import kill_orphaned_proxies, ray_processes


@pytest.fixture
def proxies_of_the_killed(no_processes_left: None) -> Iterator[None]:
    """Ends the HAProxy that Ray leaves behind when a driver is killed, and with it the local cluster."""
    before = ray_processes(("haproxy",))
    yield
    kill_orphaned_proxies(before)
