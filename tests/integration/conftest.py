"""Fixtures of tests that kill drivers, or train in their own process."""

from collections.abc import Iterator

import pytest
from ray_cluster import Cluster, kill_orphaned_proxies, ray_processes


@pytest.fixture
def kill_leftover_proxies(no_processes_left: None) -> Iterator[None]:
    """Kill the HAProxy processes that Ray leaves behind if a driver and its local cluster are killed."""
    before = ray_processes(("haproxy",))
    yield
    kill_orphaned_proxies(before)


@pytest.fixture(scope="module")
def connected(shared_cluster: Cluster) -> Iterator[None]:
    """Connect this process to the shared cluster."""
    with shared_cluster.connected():
        yield


@pytest.fixture(scope="module")
def connected_on_one_thread(shared_cluster: Cluster) -> Iterator[None]:
    """Connect this process as a driver that trains on a single thread, while the engine runs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with shared_cluster.connected():
        yield
    torch.set_num_threads(threads)
