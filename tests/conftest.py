"""The environment that every test needs before it imports Ray, the shared Ray cluster, and how the tests are divided.

`pytest -n 2` gives whole files to two processes: all files that use the shared Ray cluster to one, all others to the other, until
one is done and takes what is left. `pytest -m slow --slow-part HASH` runs a tenth of the slow tests, another one for each commit.
"""

import functools
import hashlib
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import SESSION, Cluster, assert_no_new_ray_processes, ray_head, restore_interrupts

# `ray start` asks for a token once this user has one, and a driver with an explicit address sends it only with this set
os.environ["RAY_AUTH_MODE"] = "token"
os.environ |= SESSION
if "PYTEST_XDIST_WORKER" in os.environ:  # two test processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
restore_interrupts()

SLOW_PARTS = 10
ROOT = Path(__file__).parent.parent
USES_CLUSTER = re.compile(r"\b(shared_)?cluster: (Cluster|Any)\b")
"""A parameter of a test or fixture that uses the shared cluster."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part",
        metavar="HASH",
        help=f"of the slow tests, run the {SLOW_PARTS}th part that belongs to this hexadecimal commit hash",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    if commit := config.getoption("--slow-part"):
        return f"slow tests: part {int(commit, 16) % SLOW_PARTS} of {SLOW_PARTS}, by commit {commit}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {"cluster": 0, "tests/integration": 1, "tests/unit": 3}
    items.sort(
        key=lambda item: next((n for start, n in order.items() if _scope(item.nodeid).startswith(start)), 2)
    )
    if commit := config.getoption("--slow-part"):
        part = int(commit, 16) % SLOW_PARTS
        kept = [
            item for item in items if not item.get_closest_marker("slow") or _slow_part(item.nodeid) == part
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _scope(nodeid: str) -> str:
    """Return the name of the tests that run in one process with this one: the cluster's, those of vLLM, or its file's."""
    return _scope_of_file(nodeid.split("::", 1)[0])


@functools.cache
def _scope_of_file(path: str) -> str:
    if path.startswith("tests/vllm_cpu/"):
        return "vllm"  # its files share one engine
    sources = [ROOT / path, (ROOT / path).with_name("conftest.py")]
    uses = any(
        USES_CLUSTER.search(file.read_text()) for file in sources if file.exists() and file != Path(__file__)
    )
    return "cluster" if uses else path


def _slow_part(nodeid: str) -> int:
    """Return the part of a test. It stays the same as long as the test has its name."""
    return int(hashlib.sha256(nodeid.encode()).hexdigest(), 16) % SLOW_PARTS


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates, which some tests log and which no process can send to another."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {key: _encodable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_encodable(value) for value in data)
    return data


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ScopeScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ScopeScheduling(config, log)


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
