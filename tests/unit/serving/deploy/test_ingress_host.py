"""The ingress's machine: ports, the lock of the machine, and the launcher."""

import socket
import threading
from pathlib import Path

import pytest
import ray.serve._private.haproxy as haproxy
from ray.exceptions import RayActorError, RayTaskError

from raylight.errors import EngineStartError, PortInUseError
from raylight.serving.deploy import ingress_host
from raylight.serving.deploy.ingress_host import (
    DEFAULT_PORT,
    OWN_PROXY,
    IngressHost,
    RemoteHost,
    choose_port,
    choose_ports,
)

FALLBACK = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ingress_host, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(ingress_host, "sweep", lambda: None)
    return tmp_path


def test_a_plan_has_free_ports_the_folder_and_the_launcher(folder: Path) -> None:
    host = IngressHost()
    plan = host.plan("127.0.0.1", None)
    host.release()
    assert plan.warning == ""
    for port in (plan.port, int(plan.environment[FALLBACK])):
        with socket.create_server(("127.0.0.1", port)):
            pass
    script = Path(plan.environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert script.parent == folder
    assert script.read_text().startswith("#!/bin/sh\nexec ")
    paths = [value for name, value in plan.environment.items() if "PATH" in name or "FILE" in name]
    assert all(Path(path).parent == folder for path in paths)


def test_without_a_folder_there_is_a_warning_and_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> Path:
        raise PermissionError("/tmp/raylight-1 belongs to user 2")

    monkeypatch.setattr(ingress_host, "user_folder", no_folder)
    plan = IngressHost().plan("127.0.0.1", None)
    assert "starts without raylight's launcher (/tmp/raylight-1 belongs to user 2)" in plan.warning
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in plan.environment
    assert plan.environment[FALLBACK]


def test_without_haproxy_serve_s_own_proxy_is_used_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_binary() -> str:
        raise FileNotFoundError("HAProxy binary not found. Install the package")

    monkeypatch.setattr(haproxy, "get_haproxy_binary", no_binary)
    plan = IngressHost().plan("127.0.0.1", None)
    assert plan.environment.items() >= OWN_PROXY.items()
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in plan.environment
    assert plan.warning.startswith(
        "the head node has no HAProxy (HAProxy binary not found), so Ray Serve's own"
    )
    assert "\n" not in plan.warning


def test_whoever_sets_serve_s_switch_gets_no_haproxy_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    plan = IngressHost().plan("127.0.0.1", None)
    assert plan.environment.items() >= OWN_PROXY.items()
    assert plan.warning == ""


def test_drivers_take_their_ports_one_after_another() -> None:
    first, second = IngressHost(), IngressHost()
    taken: list[str] = []
    planned = threading.Event()

    def other() -> None:
        second.plan("127.0.0.1", None)
        taken.append("second")
        planned.set()

    first.plan("127.0.0.1", None)
    first.plan("127.0.0.1", None)  # another attempt of the same driver
    thread = threading.Thread(target=other)
    thread.start()
    assert not planned.wait(0.3)
    taken.append("first")
    first.release()
    assert planned.wait(10)
    assert taken == ["first", "second"]
    second.release()
    thread.join(10)


def test_a_driver_that_never_ends_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ingress_host, "PORT_LOCK_S", 0.2)
    frozen, other = IngressHost(), IngressHost()
    frozen.plan("127.0.0.1", None)
    assert other.plan("127.0.0.1", None).port
    assert "was held for 0.2 s; choosing ports without it" in caplog.text
    frozen.release()


class Actor:
    """Actor whose calls raise an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.plan = self.remove_folder = self.connection_limit = self

    def remote(self, *arguments: object) -> Exception:
        return self._error


@pytest.fixture
def ray_get(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(error: Exception) -> None:
        raise error

    monkeypatch.setattr(ingress_host.ray, "get", raise_error)


@pytest.mark.usefixtures("ray_get")
def test_a_head_without_raylight_gets_a_plan_and_a_warning() -> None:
    error = RayActorError(error_msg="The actor died\nModuleNotFoundError: No module named 'raylight'")
    host = RemoteHost(Actor(error))
    plan = host.plan("127.0.0.1", None)
    assert "raylight cannot be loaded on the head node" in plan.warning
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in plan.environment
    assert FALLBACK in plan.environment
    assert host.connection_limit() is None
    host.remove_folder("node")


@pytest.mark.usefixtures("ray_get")
def test_a_taken_port_of_the_head_is_a_typed_error() -> None:
    taken = PortInUseError("port 8000 is taken")
    with pytest.raises(PortInUseError) as caught:
        RemoteHost(Actor(RayTaskError("plan", "traceback", taken))).plan("127.0.0.1", 8000)
    assert caught.value is taken


def test_a_taken_port_is_replaced_unless_it_was_requested() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert choose_port("127.0.0.1", None, port) != port
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is taken"):
            choose_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [None, 8000])
@pytest.mark.parametrize("host", ["::1", "198.51.100.7"])
def test_an_address_of_another_machine_is_no_taken_port(host: str, port: int | None) -> None:
    with pytest.raises(EngineStartError, match=f"cannot listen on engine.host='{host}' .* give an IPv4"):
        choose_port(host, port)


def test_the_fallback_proxy_never_gets_the_port_of_the_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_host, "FALLBACK_PORT", DEFAULT_PORT)
    port, others = choose_ports("127.0.0.1", None)
    assert str(port) not in others.values()
