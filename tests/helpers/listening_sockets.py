"""Listening sockets of a local run, and those that are known."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = Path(__file__).parents[1] / "integration" / "socket_run.py"
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


ZMQ = r"/tmp/[0-9a-f]{8}-[0-9a-f-]{27}"
VLLM = [
    Known(r"^ray::ServeReplica|^VLLM::", "unix", ZMQ, "owner of the socket: ZeroMQ between vLLM's processes"),
    Known(r"^VLLM::", "tcp", LOOPBACK, "none: torch's store and gloo have none"),
]
"""Further sockets of a run with vLLM."""


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
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "sockets.json").read_text())
