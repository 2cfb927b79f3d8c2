"""The command `raylight ui`: its address, its port, its end."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from recorded_run import record_run

from raylight.errors import ConfigError
from raylight.trainer.output.ui_process import ui_process
from raylight.ui.app import serve_ui


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return (await record_run(tmp_path / "run")).folder


def test_beside_a_run(folder: Path) -> None:
    shown: list[str] = []
    with ui_process(folder, shown.append) as address:
        url = address.result(240)
        with urllib.request.urlopen(f"{url}api/runs", timeout=60) as answer:
            assert json.load(answer)["runs"][0]["id"] == "run"
    assert shown == [f"the run is shown at {url}"]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}api/runs", timeout=60)


def test_elsewhere_than_on_loopback_it_needs_a_key(folder: Path) -> None:
    command = [sys.executable, "-m", "raylight.cli", "ui", str(folder), "--host", "0.0.0.0", "--until-closed"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address, _, key = process.stdout.readline().strip().rpartition("?key=")
    port = address.rstrip("/").rpartition(":")[2]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=60)
    allowed = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/runs", headers={"authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(allowed, timeout=60) as answer:
        assert answer.status == 200
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_a_port_that_is_taken_is_an_error(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*choose another"):
            serve_ui([folder], port=port)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        serve_ui([tmp_path / "none"])


def test_half_sent_headers_lock_nobody_out(folder: Path) -> None:
    program = f"ulimit -n 1024; exec {sys.executable} -m raylight.cli ui {folder} --until-closed"
    process = subprocess.Popen(
        ["sh", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with process, contextlib.ExitStack() as stack:
        url = process.stdout.readline().strip().rpartition(" ")[2]
        port = int(url.rstrip("/").rpartition(":")[2])
        for _ in range(1100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0")
        with urllib.request.urlopen(f"{url}api/runs", timeout=120) as answer:
            assert json.load(answer)["runs"][0]["id"] == "run"
        process.communicate(timeout=120)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
