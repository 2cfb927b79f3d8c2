"""Environment for tests that import Ray, the shared Ray cluster, and the scheduling of tests on processes.

`pytest -n 2` schedules whole files on two processes. All files that use the shared Ray cluster go to one
process and all others to the other; the process that finishes first takes files that are left.
`pytest -m slow --slow-part HASH` runs a twentieth of the slow tests; the commit hash selects the part. Tests
with `slow(parts=N)`, which are slower still or much quicker, are divided into N parts. A part that takes too
long skips the slow tests that are left. With `-m "slow or not slow"`, the part runs before all other tests.

Tests with `framework(MODULE, ...)` need packages of the extra `frameworks`. They are slow tests, in four
parts if not marked otherwise. Without the packages they are skipped; with RAYLIGHT_REQUIRE_FRAMEWORKS=1,
pytest ends with an error instead.

`--shuffle SEED` shuffles the files, and the tests of each file.
"""

import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import os
import random
import re
import ssl
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpcore2
import hypothesis
import pytest
from packaging.requirements import Requirement
from ray_cluster import (
    SESSION,
    Cluster,
    assert_no_new_ray_processes,
    end_orphans,
    ray_head,
    restore_interrupts,
)

from raylight._utils.garbage import collect_less_often

# once the user has a token, `ray start` requires it; drivers with an explicit address need this mode
os.environ["RAY_AUTH_MODE"] = "token"
os.environ |= SESSION
# the processes of Ray import the same modules a few hundred times; half of that time is compiling them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# by default Ray's workers wait for every other process of the machine, the other test process included
os.environ |= {"RAY_worker_niceness": "0"}
if "PYTEST_XDIST_WORKER" in os.environ:  # two test processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
restore_interrupts()
# each client reads the certificates of public servers, which takes 25 ms; no test asks such a server
NEW_CONTEXT, PUBLIC_CONTEXT = ssl.create_default_context, functools.cache(ssl.create_default_context)
ssl.create_default_context = lambda *args, **kwargs: (
    PUBLIC_CONTEXT(**kwargs) if kwargs.keys() == {"cafile"} and not args else NEW_CONTEXT(*args, **kwargs)
)
if hasattr(httpcore2, "default_ssl_context"):  # releases of httpx2 differ
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
FRAMEWORK_PARTS = 4
QUICK = "not slow and not gpu"
"""Marks of the test line, as in pyproject.toml."""
SHOWN_FILES = 25
SHOWN_FROM_S = 60.0
"""Seconds of all tests from which on the slowest files are listed."""
SLOW_PARTS = 20
SLOW_PART_S = 150.0
"""Seconds after which a part begins no further slow test."""
STARTED = time.monotonic()
ROOT = Path(__file__).parent.parent
CLUSTER = r"\b(?:shared_)?cluster: (?:Cluster|Any)\b"
"""Parameter of a test or fixture that uses the shared cluster."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part",
        metavar="HASH",
        help=f"run one of {SLOW_PARTS} parts of the slow tests, selected by this hexadecimal commit hash",
    )
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="shuffle the files and the tests of each with this seed, and draw other examples in each run",
    )


def pytest_configure(config: pytest.Config) -> None:
    # a deadline per example fails on a busy machine; pytest-timeout bounds the whole test
    by_chance = config.getoption("--shuffle") or config.getoption("--slow-part")
    examples = 100 if by_chance else 20  # equal ones in each run
    hypothesis.settings.register_profile(
        "raylight", deadline=None, derandomize=not by_chance, max_examples=examples
    )
    hypothesis.settings.load_profile("raylight")
    if os.environ.get("RAYLIGHT_REQUIRE_FRAMEWORKS") == "1" and (missing := _missing_frameworks()):
        raise pytest.UsageError(
            f"RAYLIGHT_REQUIRE_FRAMEWORKS=1, but {', '.join(missing)} are not installed; "
            'pip install -e ".[frameworks]"'
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses"):
        return  # the process that only hands out the tests
    janitor = end_orphans()
    session.config.add_cleanup(lambda: (janitor.stdin.close(), janitor.wait()))  # type: ignore[union-attr]


def _missing_frameworks() -> list[str]:
    """Return the packages of the extra `frameworks` that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [Requirement(text).name for text in project["optional-dependencies"]["frameworks"]]
    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions()}
    return [name for name in named if name not in installed]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files whose tests are all slow in the test line: some import frameworks for seconds."""
    is_slow = re.compile(r"(?m)^pytestmark = .*\b(slow|framework)\b").search
    skips = config.option.markexpr == QUICK and collection_path.suffix == ".py"
    return True if skips and is_slow(collection_path.read_text()) else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = []
    if commit := config.getoption("--slow-part"):
        lines.append(f"slow tests: one of {SLOW_PARTS} parts, by commit {commit}")
    if seed := config.getoption("--shuffle"):
        lines.append(f"in random order: --shuffle {seed}")
    return lines


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("framework") and not item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.slow(parts=FRAMEWORK_PARTS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # pytest's own hook comes afterwards, and puts tests together that share a parametrized fixture
    if seed := config.getoption("--shuffle"):
        _shuffle(items, seed)
    order = {"cluster": 0, "tests/integration": 1, "tests/unit": 3}
    items.sort(
        key=lambda item: next((n for start, n in order.items() if _scope(item.nodeid).startswith(start)), 2)
    )
    if commit := config.getoption("--slow-part"):
        kept = [item for item in items if _is_selected(item, int(commit, 16))]
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        begin = int(commit, 16) // SLOW_PARTS % max(len(kept), 1)  # no test is always the last one
        items[:] = sorted(kept[begin:] + kept[:begin], key=lambda item: not _is_slow(item))


def _shuffle(items: list[pytest.Item], seed: str) -> None:
    luck = random.Random(seed)
    places = {path: luck.random() for path in dict.fromkeys(item.path for item in items)}
    items.sort(key=lambda item: (places[item.path], luck.random()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exempt the imported modules and the collected tests, millions of objects, from garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        if transformers := sys.modules.get("transformers"):
            # it writes each configuration as text for a line of its log, a tenth of the time of learner tests
            transformers.PreTrainedConfig.__repr__ = object.__repr__
        gc.freeze()
        gc.enable()
        collect_less_often()


def _scope(nodeid: str) -> str:
    """Return the scheduling group of a test: "cluster", "vllm", "ranks" or its file. A group runs in one
    process."""
    return _scope_of_file(nodeid.split("::", 1)[0])


@functools.cache
def _scope_of_file(path: str) -> str:
    if path.startswith("tests/vllm_cpu/"):
        return "vllm"  # its files share one engine
    names, conftest = [CLUSTER], (ROOT / path).with_name("conftest.py")
    if conftest.exists() and conftest != Path(__file__):
        names += re.findall(rf"def (\w+)\([^)]*{CLUSTER}", conftest.read_text())
    text = (ROOT / path).read_text()
    if "run_ranks(" in text:
        return "ranks"  # its files share a server that forks ranks, whose imports take long
    return "cluster" if any(re.search(rf"\b{name}\b", text) for name in names) else path


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _is_selected(item: pytest.Item, commit: int) -> bool:
    """True if a test is not slow, or belongs to the commit's part. A test's part depends on its name only."""
    slow = item.get_closest_marker("slow")
    if slow is None:
        return True
    parts = slow.kwargs.get("parts", SLOW_PARTS)
    return int(hashlib.sha256(item.nodeid.encode()).hexdigest(), 16) % parts == commit % parts


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    part = item.config.getoption("--slow-part")
    if part and _is_slow(item) and time.monotonic() > STARTED + SLOW_PART_S:
        pytest.skip(f"this part of the slow tests has taken {SLOW_PART_S:g} s")
    for mark in item.iter_markers("framework"):
        for module in mark.args:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f'needs {module}: pip install -e ".[frameworks]"')


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the files whose tests took longest."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::", 1)[0]] += report.duration
    if seconds.total() < SHOWN_FROM_S:
        return
    terminalreporter.section(f"slowest {SHOWN_FILES} files")
    for path, taken in seconds.most_common(SHOWN_FILES):
        terminalreporter.write_line(f"{taken:7.1f} s  {path}")
    terminalreporter.write_line(f"{seconds.total():7.1f} s  all {len(seconds)} files")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates: some tests log them, and xdist cannot send them to its controller."""
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
    """Ray cluster shared by all tests of this pytest process. A test must leave it unchanged."""
    with ray_head() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Shared cluster; RAY_ADDRESS points to it while the tests of a module run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", shared_cluster.address)
        yield shared_cluster


@pytest.fixture
def no_processes_left() -> Iterator[None]:
    """Assert that all processes of Ray and Serve that the test starts also end."""
    with assert_no_new_ray_processes():
        yield
