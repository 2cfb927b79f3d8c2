"""Serve's ports: chosen by one driver of a machine at a time."""

import threading
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayError

from raylight.errors import EngineStartError
from raylight.serving.deploy import ingress


def test_drivers_choose_their_ports_one_after_another() -> None:
    inside, log = threading.Event(), []

    def other() -> None:
        assert inside.wait(10)
        with ingress._port_lock():
            log.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with ingress._port_lock():
        inside.set()
        thread.join(0.3)
        log.append("first")
    thread.join(10)
    assert log == ["first", "second"]


def test_a_driver_that_never_ends_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PORT_LOCK_S", 0.2)
    with ingress._port_lock(), ingress._port_lock():
        pass


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "alive_nodes", lambda: [{}])


def test_a_slow_serve_is_waited_for(
    one_node: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {}

    def start(**options: Any) -> None:
        given.update(options)
        raise TimeoutError("HTTP proxies not available after 60s.")

    monkeypatch.setattr(ingress.serve, "start", start)
    assert ingress.start_serve(None, None)[0] == "127.0.0.1"
    assert "slow to start (HTTP proxies not available after 60s.)" in caplog.text
    assert given["controller_options"]["runtime_env"]["env_vars"].items() >= ingress.PATIENCE.items()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RayActorError(), "Ray Serve did not start"),
        (
            RayError("HAProxy crashed: cannot bind socket (Address already in use) for [0.0.0.0:9101]"),
            r"ports \(\d+, \d+, \d+, \d+, \d+\) was free, .* Start the run again",
        ),
    ],
    ids=["actor", "port"],
)
def test_a_failed_serve_is_an_error(
    error: RayError, message: str, one_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**options: Any) -> None:
        raise error

    monkeypatch.setattr(ingress.serve, "start", start)
    with pytest.raises(EngineStartError, match=message):
        ingress.start_serve(None, None)
