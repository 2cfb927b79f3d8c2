"""One local Ray for all tests of a module here."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Runs join it; the runners may import the modules that are here."""
    import ray

    before = os.environ.pop("RAY_ADDRESS", None)
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False, runtime_env=here)
    yield
    ray.shutdown()
    if before:
        os.environ["RAY_ADDRESS"] = before
