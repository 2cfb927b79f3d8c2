"""Start of Serve: attempts, deadlines and errors."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raylight.errors import EngineStartError
from raylight.serving.deploy import ingress
from raylight.serving.deploy.ingress_host import OWN_PROXY, IngressPlan

TAKEN = RayError("HAProxy crashed: cannot bind socket (Address already in use) for [127.0.0.1:8000]")


class Machine:
    """Machine of the ingress that offers 8000, 8001 and so on."""

    def __init__(self, warning: str = "", environment: dict[str, str] | None = None) -> None:
        self.planned: list[tuple[str, int | None]] = []
        self.warning, self.environment = warning, environment or {"PLAN": "1"}

    def plan(self, host: str, port: int | None) -> IngressPlan:
        self.planned.append((host, port))
        return IngressPlan(7999 + len(self.planned), self.environment, self.warning)

    def remove_folder(self, node_id: str) -> None:
        raise NotImplementedError


@dataclass
class StartedServe:
    """A Serve whose attempts to start have given outcomes."""

    calls: list[dict[str, Any]]
    """Options of each attempt."""
    start: Callable[..., tuple[str, int]]


Serve = Callable[..., StartedServe]


def set_head(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    node = {"NodeManagerAddress": address, "Resources": {"node:__internal_head__": 1.0}}
    monkeypatch.setattr(ingress, "alive_nodes", lambda: [node])


@pytest.fixture
def serve_raises(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Give the attempts of Serve's start their outcomes."""

    def set_outcomes(*outcomes: Exception | None) -> StartedServe:
        calls: list[dict[str, Any]] = []

        def create(**options: Any) -> tuple[Any, list[Any]]:
            calls.append(options)
            return SimpleNamespace(_actor_id=SimpleNamespace(binary=lambda: b"id")), []

        def get(proxies: list[Any], timeout: float) -> None:
            assert calls[-1]["deployed"], "replicas start before the proxies are up"
            assert 0 < timeout <= 90
            if outcome := outcomes[len(calls) - 1]:
                raise outcome

        def deploy(host: str, port: int) -> None:
            assert calls[-1]["http_options"] == {"host": host, "port": port}
            calls[-1]["deployed"] = True

        def start_serve(host: str | None = None, machine: Machine | None = None) -> tuple[str, int]:
            return ingress.start_serve(host, None, machine or Machine(), 90, deploy)

        monkeypatch.setattr(ingress, "_create_controller_and_proxy_refs", create)
        monkeypatch.setattr(ingress.ray, "get", get)
        monkeypatch.setattr(ingress.ray, "is_initialized", lambda: True)
        return StartedServe(calls, start_serve)

    set_head(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(ingress, "_controller_id", lambda: b"id")
    stored: dict[bytes, bytes] = {}
    monkeypatch.setattr(ingress.internal_kv, "_internal_kv_put", stored.__setitem__)
    monkeypatch.setattr(ingress.internal_kv, "_internal_kv_get", stored.get)
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
    serve = serve_raises(None)
    set_head(monkeypatch, head)
    node = None if started_here is None else SimpleNamespace(is_head=lambda: started_here)
    monkeypatch.setattr(ingress.ray_worker, "_global_node", node)
    assert serve.start() == (host, 8000)


def test_serve_starts_with_what_the_machine_planned(
    serve_raises: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve = serve_raises(None)
    assert serve.start(machine=Machine("no launcher")) == ("127.0.0.1", 8000)
    variables = serve.calls[0]["controller_options"].runtime_env["env_vars"]
    for wanted in (
        ingress.SERVE_FLAGS,
        ingress.HEALTH,
        ingress.ROUTING,
        {"PLAN": "1", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "90"},
    ):
        assert variables.items() >= wanted.items()
    assert serve.calls[0]["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert "no launcher" in caplog.text


def test_the_flags_of_the_started_serve_are_those_of_its_replicas(
    serve_raises: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = serve_raises(None)
    assert ingress.started_flags() == {}, "another program's Serve"
    serve.start(machine=Machine(environment=OWN_PROXY))
    assert ingress.started_flags() == ingress.SERVE_FLAGS | OWN_PROXY
    variables = serve.calls[0]["controller_options"].runtime_env["env_vars"]
    assert variables.items() >= OWN_PROXY.items()
    monkeypatch.setattr(ingress, "_controller_id", lambda: b"another")
    assert ingress.started_flags() == {}


def test_a_port_that_was_taken_meanwhile_is_replaced(
    serve_raises: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve, machine = serve_raises(TAKEN, RayActorError(), None), Machine()
    assert serve.start("0.0.0.0", machine) == ("0.0.0.0", 8002)
    assert [call["http_options"]["port"] for call in serve.calls] == [8000, 8001, 8002]
    assert machine.planned == [("0.0.0.0", None)] * 3
    assert "Address already in use" in caplog.text


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([TAKEN] * 3, r"did not start \(3 attempts\): .*Address already in use"),
        ([RayError("HAProxy was not started: unknown template")], r"\(1 attempts\): .*unknown template"),
        ([GetTimeoutError()], r"not up within 90 s \(engine.start_timeout_s\)"),
    ],
    ids=["always taken", "hopeless", "late"],
)
def test_a_serve_that_does_not_start_is_an_error(
    outcomes: list[Exception], message: str, serve_raises: Serve
) -> None:
    serve = serve_raises(*outcomes)
    with pytest.raises(EngineStartError, match=message):
        serve.start()
    assert len(serve.calls) == len(outcomes)


def test_serve_starts_no_cluster_for_a_run_whose_connection_has_ended(
    serve_raises: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = serve_raises(RayActorError(), None)
    connected = iter([True, False])
    monkeypatch.setattr(ingress.ray, "is_initialized", lambda: next(connected))
    with pytest.raises(EngineStartError, match=r"did not start \(1 attempts\)"):
        serve.start()
    monkeypatch.setattr(ingress.ray, "is_initialized", lambda: False)
    with pytest.raises(EngineStartError, match="the connection to Ray has ended"):
        serve.start()
    assert len(serve.calls) == 1
