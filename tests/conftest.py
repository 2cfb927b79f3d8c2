"""The environment that every test needs before it imports Ray, and the Ray cluster that the tests share."""

import os
from collections.abc import Iterator

import pytest
from ray_cluster import SESSION, Cluster, assert_no_new_ray_processes, ray_head, restore_interrupts

# `ray start` asks for a token once this user has one, and a driver with an explicit address sends it only with this set
os.environ["RAY_AUTH_MODE"] = "token"
os.environ |= SESSION
restore_interrupts()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """The one cluster of this pytest process. A test that uses it leaves it as it was."""
    with ray_head() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, to which RAY_ADDRESS points while the tests of a module run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", shared_cluster.address)
        yield shared_cluster


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Ray's and Serve's processes that the test starts end with it."""
    with assert_no_new_ray_processes():
        yield
