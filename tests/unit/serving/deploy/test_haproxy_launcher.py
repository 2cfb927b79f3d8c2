"""HAProxy behind its launcher: the real HAProxy with the configuration that Serve renders."""

import contextlib
import os
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import (
    BackendConfig,
    HAProxyApi,
    HAProxyConfig,
    ServerConfig,
    get_haproxy_binary,
)
from ray.serve.config import HTTPOptions, gRPCOptions
from ray_cluster import eventually, free_port

from raylight.serving.deploy import haproxy_launcher as launcher
from raylight.serving.deploy.ingress import STICKY_ROUTING

OTHER = "127.0.0.2"
"""Address of this machine that stands for another machine's."""
FEW = 60
"""Connections that the HAProxy of these tests accepts."""
IDLE = 5000
"""Connections of a large run at the same time, above Ray's own limit of 4096."""


class Answer(BaseHTTPRequestHandler):
    """Answers every request with the port of its server."""

    def do_GET(self) -> None:
        port = str(self.server.server_port).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(port)))
        self.end_headers()
        self.wfile.write(port)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """Serve one replica's port during the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.handle_error = lambda request, address: None  # health checks close early
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def replica() -> Iterator[int]:
    """Port of a server that stands for a replica."""
    with serving() as port:
        yield port


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[int]]:
    """Ports of three servers that stand for replicas."""
    with serving() as first, serving() as second, serving() as third:
        yield [first, second, third]


class Ingress:
    """HAProxy with the configuration of Serve, started by the launcher."""

    def __init__(self, folder: Path, replica: int, host: str = "127.0.0.1") -> None:
        self.folder, self.port = folder, free_port()
        config = HAProxyConfig(
            http_options=HTTPOptions(host=host, port=self.port),
            grpc_options=gRPCOptions(),
            is_head=True,
            metrics_enabled=False,
            socket_path=str(folder / "admin.sock"),
            server_state_base=str(folder),
            server_state_file=str(folder / "server-state"),
            balance_algorithm=STICKY_ROUTING,
        )
        (folder / "server-state").write_text("1\n")
        servers = [ServerConfig("replica", "127.0.0.1", replica)]
        self.backend = BackendConfig("http-app", "/app", servers=servers, app_name="app")
        self.api = HAProxyApi(config, {"http-app": self.backend}, str(folder / "haproxy.cfg"))
        self.config = folder / "haproxy.cfg"
        self.write_config()
        self.script = launcher.install(folder, get_haproxy_binary())

    def write_config(self) -> None:
        """Write the configuration as Serve does before each start."""
        self.api._generate_config_file_internal()

    def command(self, *options: str) -> list[str]:
        return [str(self.script), "-db", "-f", str(self.config), "-dR", *options]

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(self.command(), stderr=subprocess.PIPE) as process:
            try:
                self.wait(process.pid)
                yield process
            finally:
                process.kill()

    def wait(self, pid: int) -> None:
        eventually(lambda: self.pid() == pid, 30, "the start of HAProxy")

    def ask(self, command: str, path: str = "admin.sock") -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.folder / path))
            client.sendall(command.encode())
            return client.makefile().read()

    def pid(self) -> int:
        """Return the process that responds on the admin socket."""
        with contextlib.suppress(OSError):
            return int(re.search(r"^Pid: (\d+)$", self.ask("show info\n"), re.MULTILINE).group(1))
        return 0

    def serve(self, ports: list[int]) -> None:
        """Have HAProxy send requests to these replicas after its next start."""
        self.backend.servers = [ServerConfig(f"replica-{port}", "127.0.0.1", port) for port in ports]
        self.write_config()

    def homes(self, count: int) -> list[int]:
        """Return the port of the replica that the requests of each of so many rollouts reach.

        One connection: of two, HAProxy may still count the end of the first as load, and pass the second to
        the next replica.
        """
        ports = []
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            for rollout in range(count):
                connection.request("GET", f"/app/rollout/r{rollout}/attempt/1/v1/models")
                ports.append(int(connection.getresponse().read()))
        return ports

    def get(self, timeout: float = 10, source: str = "127.0.0.1") -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout, source_address=(source, 0))
        with contextlib.closing(connection):
            connection.request("GET", "/app/health")
            return connection.getresponse().status

    def half_sent(self, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
        """Open connections that never finish their headers."""
        address = ("127.0.0.1", self.port)
        clients = [socket.create_connection(address, source_address=(source, 0)) for _ in range(count)]
        for client in clients:
            client.sendall(b"POST /app/v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        eventually(lambda: f"\nCurrConns: {count}\n" in self.ask("show info\n"), 30, "all connections")
        return clients


@pytest.fixture
def ingress(tmp_path: Path, replica: int) -> Ingress:
    return Ingress(tmp_path, replica)


def test_the_configuration_is_valid_and_hardened_once(ingress: Ingress) -> None:
    done = subprocess.run(ingress.command("-c"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hardened = ingress.config.read_text()
    assert hardened.startswith(launcher.MARK)
    assert launcher.harden(hardened, str(ingress.folder), 1000) == hardened


def test_nothing_but_the_ingress_listens_on_the_network(ingress: Ingress) -> None:
    with ingress.running() as process:
        sockets = psutil.Process(process.pid).net_connections("inet")
        addresses = {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}
        assert addresses == {("127.0.0.1", ingress.port)}
        assert ingress.get() == 200
        assert stat.S_IMODE(ingress.folder.stat().st_mode) == 0o700
        for path in ("admin.sock", "stat.sock", "prom.sock"):
            assert stat.S_IMODE((ingress.folder / path).stat().st_mode) == 0o600
        assert "http-app,replica" in ingress.ask("GET /stats;csv HTTP/1.0\r\n\r\n", "stat.sock")
        assert "haproxy_process_uptime" in ingress.ask("GET /metrics HTTP/1.0\r\n\r\n", "prom.sock")


def test_a_reload_takes_over_and_keeps_the_process_id(ingress: Ingress) -> None:
    with ingress.running() as first:
        ingress.write_config()
        options = ("-sf", str(first.pid), "-x", str(ingress.folder / "admin.sock"))
        with subprocess.Popen(ingress.command(*options), stderr=subprocess.PIPE) as second:
            ingress.wait(second.pid)
            assert first.wait(30) == 0
            assert ingress.get() == 200
            second.kill()


def test_rollouts_stay_with_their_replicas_when_others_leave_and_join(
    ingress: Ingress, replicas: list[int]
) -> None:
    first, second, third = replicas
    homes = []
    for ports in ([first, second, third], [third, second], [second, first, third]):
        ingress.serve(ports)
        with ingress.running():
            homes.append(ingress.homes(60))
    before, without_first, after = homes
    assert set(before) == set(replicas)
    assert all(new == old for new, old in zip(without_first, before, strict=True) if old != first)
    assert after == before


def test_as_many_connections_as_the_open_files_allow(ingress: Ingress) -> None:
    assert launcher.connection_limit() <= launcher.MAX_CONNECTIONS
    with ingress.running():
        assert f"\nMaxconn: {launcher.connection_limit()}\n" in ingress.ask("show info\n")


@pytest.mark.slow
def test_thousands_of_idle_connections_leave_room(ingress: Ingress) -> None:
    """Each concurrent rollout keeps a connection, which is idle while its agent works."""
    count = min(IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, launcher.connection_limit() - 10)
    with ingress.running(), contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", ingress.port)))
            client.sendall(b"GET /-/none HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 404")
        assert f"\nCurrConns: {count}\n" in ingress.ask("show info\n")
        assert ingress.get() == 200
        idle = f"\nCurrConns: {count}\n"
        eventually(lambda: idle in ingress.ask("show info\n"), 30, "the end of the request")


def test_few_open_files_are_no_error(ingress: Ingress) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))

    with subprocess.Popen(ingress.command(), stderr=subprocess.PIPE, preexec_fn=limit) as process:
        ingress.wait(process.pid)
        assert "\nMaxconn: 200\n" in ingress.ask("show info\n")
        process.kill()


@pytest.fixture
def small_ingress(ingress: Ingress) -> Ingress:
    """HAProxy with few connections."""
    ingress.config.write_text(launcher.harden(ingress.config.read_text(), str(ingress.folder), FEW))
    return ingress


@pytest.fixture
def short_header_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "HEADER_TIMEOUT_S", 1)


@pytest.mark.usefixtures("short_header_timeout")
def test_half_sent_headers_lock_nobody_out(small_ingress: Ingress) -> None:
    with small_ingress.running(), contextlib.ExitStack() as stack:
        clients = small_ingress.half_sent(FEW)
        for client in clients:
            stack.enter_context(client)
        assert small_ingress.get(timeout=60) == 200
        assert clients[0].recv(100).startswith(b"HTTP/1.1 408"), "HAProxy ended it, not the test"


@pytest.mark.usefixtures("short_header_timeout")
def test_a_half_sent_body_reaches_no_replica(small_ingress: Ingress) -> None:
    head = b"POST /app/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    with small_ingress.running(), socket.create_connection(("127.0.0.1", small_ingress.port)) as client:
        client.settimeout(60)
        client.sendall(head + b"{")
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_a_source_gets_half_of_the_connections_unless_it_is_this_machine(
    replica: int, small_ingress: Ingress
) -> None:
    # the rule exempts loopback: exempt another address instead, and loopback is a source like others
    config = small_ingress.config.read_text()
    assert "unless { src 127.0.0.0/8 ::1 }" in config
    small_ingress.config.write_text(config.replace("src 127.0.0.0/8 ::1", "src 192.0.2.99"))
    with small_ingress.running(), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client) for client in small_ingress.half_sent(FEW // 2, OTHER)]
        counted = f"conn_cur={FEW // 2}\n"  # HAProxy counts a connection in all before it counts its source
        eventually(lambda: counted in small_ingress.ask("show table http_frontend\n"), 30, "the count")
        with pytest.raises(OSError, match=r"Connection reset|Broken pipe|closed connection"):
            small_ingress.get(source=OTHER)
        assert small_ingress.get() == 200, "this machine reaches its own address"
        for client in clients:
            client.close()
        eventually(lambda: small_ingress.get(source=OTHER) == 200, 30, "an answer")


PARENT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:])
print(process.pid, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def manager(ingress: Ingress) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a process that stands for Serve's manager, and the HAProxy that it started."""
    command = [sys.executable, "-c", PARENT, *ingress.command()]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipe) as parent:
        try:
            pid = int(parent.stdout.readline())
            ingress.wait(pid)
            yield parent, pid
        finally:
            parent.kill()


def ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 30)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death")
@pytest.mark.parametrize("frozen", [False, True])
def test_haproxy_ends_with_its_manager(ingress: Ingress, frozen: bool) -> None:
    with manager(ingress) as (parent, pid):
        handle = os.pidfd_open(pid)
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert ended(handle)
        os.close(handle)


def test_a_new_manager_takes_the_ports_of_a_frozen_one(ingress: Ingress) -> None:
    with manager(ingress) as (parent, pid):
        handle = os.pidfd_open(pid)
        parent.send_signal(signal.SIGSTOP)
        ingress.write_config()
        with manager(ingress) as (_, successor):
            assert ended(handle)
            assert ingress.pid() == successor
            assert ingress.get() == 200
        os.close(handle)


@pytest.mark.parametrize(
    "text", ["    stats socket {} mode 666 level admin", "listen stats", "frontend http_frontend"]
)
def test_an_unknown_template_is_an_error(ingress: Ingress, text: str) -> None:
    config = ingress.config.read_text()
    text = text.format(ingress.folder / "admin.sock")
    assert text in config
    ingress.config.write_text(config.replace(text, "unknown"))
    done = subprocess.run(ingress.command(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("HAProxy was not started: Ray's HAProxy configuration has ")
    assert "0 times instead of once" in done.stderr


def test_options_without_a_configuration_reach_haproxy(ingress: Ingress) -> None:
    done = subprocess.run([ingress.script, "-v"], capture_output=True, text=True)
    assert done.stdout.startswith("HAProxy version")
