"""Several drivers that start and end at the same time, on one cluster and on separate clusters."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from ray_cluster import Cluster
from serve_command import Server, serve

from raylight.quickstart import STARTER_MODEL
from raylight.trainer.ray_session.connection import JOB_VARIABLE

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT / 'tests' / 'unit' / 'helpers'}:{ROOT}"
JOB = {JOB_VARIABLE: json.dumps({"runtime_env": {"env_vars": {"PYTHONPATH": PYTHONPATH}}})}
"""Environment that makes the engine importable for the replicas of a cluster."""


class Driver:
    """`raylight serve` of an engine that appends the driver's name to what it is sent."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._context = serve(
            *("--model", str(STARTER_MODEL), "--name", name, "--engine", "echo_engine:EchoEngine"),
            *("--set", f"engine.args.suffix=_{name}", "--num-cpus", "0"),
            env={"RAY_ADDRESS": address, "PYTHONPATH": PYTHONPATH, **(JOB if address != "local" else {})},
        )
        self._stack = contextlib.ExitStack()
        self.server: Server | None = None

    def start(self) -> None:
        self.server = self._stack.enter_context(self._context)

    def end(self) -> None:
        self._stack.close()

    @property
    def port(self) -> int | None:
        assert self.server
        return urlsplit(self.server.url).port

    def answers(self) -> bool:
        """Return True if a request to this driver's address reaches this driver's replica."""
        assert self.server
        with openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="any", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "hi"}]
            reply = client.chat.completions.create(model=self.name, messages=messages)
        return reply.choices[0].message.content == f"hi_{self.name}"


def at_once(*actions: Callable[[], object]) -> None:
    """Call functions at the same time."""
    with ThreadPoolExecutor(len(actions)) as pool:
        list(pool.map(operator.call, actions))


@contextlib.contextmanager
def drivers(address: str, names: str) -> Iterator[list[Driver]]:
    """Start drivers at the same moment; whatever runs at the end of the block is ended."""
    started = [Driver(name, address) for name in names]
    try:
        at_once(*(driver.start for driver in started))
        yield started
    finally:
        at_once(*(driver.end for driver in started))


@pytest.mark.slow
def test_drivers_of_one_cluster_share_its_ingress(cluster: Cluster) -> None:
    with drivers(cluster.address, "ab") as (a, b):
        assert a.port == b.port
        assert a.answers()
        assert b.answers()
        a.end()
        assert b.answers()
    cluster.assert_clean()


@pytest.mark.slow
def test_the_last_drivers_of_a_cluster_end_at_once(cluster: Cluster) -> None:
    with drivers(cluster.address, "ab"):
        pass
    cluster.assert_clean()


@pytest.mark.slow
def test_a_driver_starts_while_the_last_one_ends(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        last = Driver("a", cluster.address)
        stack.callback(last.end)
        last.start()
        for name in "bcd":
            following = Driver(name, cluster.address)
            stack.callback(following.end)
            at_once(last.end, following.start)
            assert following.answers()
            last = following
    cluster.assert_clean()


@pytest.mark.slow
def test_drivers_with_clusters_of_their_own_start_at_once(no_processes_left: None) -> None:
    with drivers("local", "abc") as (a, b, c):
        assert len({driver.port for driver in (a, b, c)}) == 3
        assert all(driver.answers() for driver in (a, b, c))
        b.end()
        assert a.answers()
        assert c.answers()
        at_once(a.end, c.answers)
        assert c.answers()
