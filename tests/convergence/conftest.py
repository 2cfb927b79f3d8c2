"""Connection to the shared Ray cluster, which the runs of a module join."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import Cluster


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected(
        import_path=Path(__file__).parent
    ):  # the runners import modules of this folder
        yield
