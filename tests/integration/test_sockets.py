"""Every listening socket of a local run is known, with its address and its key."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROGRAM = Path(__file__).with_name("socket_run.py")
LOOPBACK = r"(::ffff:)?127\.0\.0\.1|::1"
SESSION = r"/tmp/ray/session_[^/]*/sockets"
NOTHING_READ = r"0\.0\.0\.0"


class Known(NamedTuple):
    """A kind of listening socket. All fields but the key are regular expressions."""

    process: str
    protocol: str
    address: str
    key: str


RAY_TOKEN = "Ray's token"
KNOWN = [
    Known(r"(^|/)(gcs_server|raylet) |^ray::|socket_run\.py ", "tcp", LOOPBACK, RAY_TOKEN),
    Known(r"ray/dashboard/dashboard\.py|autoscaler/_private/monitor\.py", "tcp", LOOPBACK, RAY_TOKEN),
    Known(r"/raylet ", "unix", rf"{SESSION}/(raylet|plasma_store)", "the machine's users"),
    Known(r"ray-dashboard-\w+", "unix", rf"{SESSION}/dash_\w+", "the machine's users"),
    Known(r"multiprocessing\.forkserver", "unix", r"/tmp/pymp-[^/]*/listener-.*", "folder of mode 700"),
    Known(r"^ray::LearnerActor", "tcp", LOOPBACK, "none: torch's store and gloo have none"),
    Known(r"^ray::ServeReplica", "tcp", LOOPBACK, "the attempt's API key"),
    Known(r"^ray::ProxyActor", "tcp", LOOPBACK, "none: Serve's fallback has no application"),
    Known(r"/haproxy ", "tcp", LOOPBACK, "the attempt's API key; none for statistics"),
    Known(r"/haproxy ", "unix", r".*/(admin|stat|prom|metrics)\.sock.*", "socket of mode 600"),
    Known(r"/haproxy ", "udp", NOTHING_READ, "none: HAProxy sends its log from them, and reads nothing"),
]
"""The table in docs/security.md."""


def unknown(sockets: list[dict[str, Any]], known: list[Known]) -> list[dict[str, Any]]:
    """Return the sockets that no kind describes."""
    return [
        found
        for found in sockets
        if not any(
            re.search(kind.process, found["process"])
            and kind.protocol == found["protocol"]
            and re.fullmatch(kind.address, found["address"])
            for kind in known
        )
    ]


def sockets_of_run(folder: Path, engine: dict[str, Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), json.dumps(engine)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "sockets.json").read_text())


@pytest.mark.usefixtures("no_processes_left")
def test_a_local_run_listens_where_it_is_documented_to(tmp_path: Path) -> None:
    sockets = sockets_of_run(tmp_path, {"replicas": 2, "num_cpus": 0.4})
    assert unknown(sockets, KNOWN) == []
    for kind in KNOWN:
        matching = len(sockets) - len(unknown(sockets, [kind]))
        assert matching, f"no socket is described by {kind}"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7"])
def test_a_socket_on_another_interface_is_found(address: str) -> None:
    learner = {"process": "ray::LearnerActor.update", "protocol": "tcp", "address": address, "port": 29500}
    assert unknown([learner | {"address": "127.0.0.1"}], KNOWN) == []
    assert unknown([learner], KNOWN) == [learner]
