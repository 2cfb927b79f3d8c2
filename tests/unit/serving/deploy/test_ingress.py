"""Start of Serve: attempts, deadlines and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError

from raylight.errors import EngineStartError
from raylight.serving.deploy import ingress
from raylight.serving.deploy.ingress_host import IngressPlan

TAKEN = RayError("HAProxy crashed: cannot bind socket (Address already in use) for [127.0.0.1:8000]")


class Machine:
    """Machine of the ingress that offers 8000, 8001 and so on."""

    def __init__(self, warning: str = "") -> None:
        self.planned: list[tuple[str, int | None]] = []
        self.warning = warning

    def plan(self, host: str, port: int | None) -> IngressPlan:
        self.planned.append((host, port))
        return IngressPlan(7999 + len(self.planned), {"PLAN": "1"}, self.warning)

    def remove_folder(self, node_id: str) -> None:
        raise NotImplementedError


Serve = Callable[..., list[dict[str, Any]]]


def set_head(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    node = {"NodeManagerAddress": address, "Resources": {"node:__internal_head__": 1.0}}
    monkeypatch.setattr(ingress, "alive_nodes", lambda: [node])


@pytest.fixture
def serve_raises(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Give Serve's start the outcomes of its calls; returns a list of their options."""

    def set_outcomes(*outcomes: Exception | None) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def start(**options: Any) -> None:
            calls.append(options)
            if outcome := outcomes[len(calls) - 1]:
                raise outcome

        monkeypatch.setattr(ingress.serve, "start", start)
        return calls

    set_head(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(ingress, "_controller_id", lambda: b"id")
    monkeypatch.setattr(ingress.internal_kv, "_internal_kv_put", lambda key, value: None)
    monkeypatch.setattr(ingress.serve, "shutdown", lambda: None)
    return set_outcomes


@pytest.mark.parametrize(
    ("head", "started_here", "host"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("10.0.0.7", None, "0.0.0.0"),
        ("10.0.0.7", False, "0.0.0.0"),
        ("10.0.0.7", True, "127.0.0.1"),
    ],
)
def test_serve_listens_where_nodes_that_join_later_can_reach_it(
    head: str, started_here: bool | None, host: str, serve_raises: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of one node may grow, unless its only node has a loopback address, or this process started
    it."""
    serve_raises(None)
    set_head(monkeypatch, head)
    node = None if started_here is None else SimpleNamespace(is_head=lambda: started_here)
    monkeypatch.setattr(ingress.ray_worker, "_global_node", node)
    assert ingress.start_serve(None, None, Machine(), 60) == (host, 8000)


def test_serve_starts_with_what_the_machine_planned(
    serve_raises: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    calls = serve_raises(None)
    assert ingress.start_serve(None, None, Machine("no launcher"), 60) == ("127.0.0.1", 8000)
    variables = calls[0]["controller_options"]["runtime_env"]["env_vars"]
    for wanted in (
        ingress.SERVE_FLAGS,
        ingress.HEALTH,
        ingress.ROUTING,
        {"PLAN": "1", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "60"},
    ):
        assert variables.items() >= wanted.items()
    assert calls[0]["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert "no launcher" in caplog.text


def test_a_port_that_was_taken_meanwhile_is_replaced(
    serve_raises: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    calls = serve_raises(TAKEN, RayActorError(), None)
    machine = Machine()
    assert ingress.start_serve("0.0.0.0", None, machine, 60) == ("0.0.0.0", 8002)
    assert [call["http_options"]["port"] for call in calls] == [8000, 8001, 8002]
    assert machine.planned == [("0.0.0.0", None)] * 3
    assert "Address already in use" in caplog.text


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([TAKEN] * 3, r"did not start \(3 attempts\): .*Address already in use"),
        ([RayError("HAProxy was not started: unknown template")], r"\(1 attempts\): .*unknown template"),
    ],
    ids=["always taken", "hopeless"],
)
def test_a_serve_that_does_not_start_is_an_error(
    outcomes: list[Exception], message: str, serve_raises: Serve
) -> None:
    calls = serve_raises(*outcomes)
    with pytest.raises(EngineStartError, match=message):
        ingress.start_serve(None, None, Machine(), 60)
    assert len(calls) == len(outcomes)


class Proxies:
    """Controller and proxy of a Serve that is slow to start."""

    def __init__(self) -> None:
        self.get_proxies = self.ready = self
        self.waited: list[float] = []

    def remote(self) -> Proxies:
        return self

    def values(self) -> list[Proxies]:
        return [self]


@pytest.mark.parametrize("late", [False, True])
def test_a_slow_serve_is_waited_for_until_the_deadline(
    late: bool, serve_raises: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve_raises(TimeoutError("HTTP proxies not available after 60s."))
    proxies = Proxies()

    def get(reference: Any, timeout: float) -> Any:
        proxies.waited.append(timeout)
        if late and isinstance(reference, list):
            raise TimeoutError
        return reference

    monkeypatch.setattr(ingress, "controller", lambda: proxies)
    monkeypatch.setattr(ingress.ray, "get", get)
    caplog.set_level(logging.WARNING)
    if late:
        with pytest.raises(EngineStartError, match=r"not up within 90 s \(engine.start_timeout_s\)"):
            ingress.start_serve(None, None, Machine(), 90)
    else:
        assert ingress.start_serve(None, None, Machine(), 90)[1] == 8000
    assert "slow to start (HTTP proxies not available after 60s.)" in caplog.text
    assert all(60 < timeout <= 90 for timeout in proxies.waited)
    assert len(proxies.waited) == 2
