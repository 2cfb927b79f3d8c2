"""`raylight serve` and `raylight tinker` as subprocesses."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from ray_cluster import BIN


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    """Base URL, without `/v1`."""
    output: str


@contextlib.contextmanager
def serve(*args: str, env: dict[str, str] | None = None, command: str = "serve") -> Iterator[Server]:
    """Run a command that serves until the block ends. It must then exit by itself on Ctrl-C.

    Args:
        env: additional environment variables; without RAY_ADDRESS, the server starts a cluster.
    """
    process = subprocess.Popen(
        [str(BIN / "raylight"), command, *args],
        env={**os.environ, "RAY_ADDRESS": "local", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    output = ""
    try:
        for line in process.stdout:
            output += line
            if " is served at " in line:
                break
        assert " is served at " in output, output
        yield Server(process, output.rpartition(" is served at ")[2].split()[0].removesuffix("/v1"), output)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
        assert "Traceback" not in rest, rest
    finally:
        print(output)  # shown if it never serves
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
