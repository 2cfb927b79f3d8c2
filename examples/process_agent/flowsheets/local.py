"""The simulator of a run: the one at `SIMULATOR_URL`, or a local one that ends with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2

from examples.process_agent.flowsheets.service import READY

URL_VARIABLE = "SIMULATOR_URL"
BY_HAND = "python -m examples.process_agent.flowsheets.service"
START_TIMEOUT_S = 60.0


class SimulatorUnavailableError(Exception):
    """The simulator cannot be reached, or did not start."""


@contextlib.contextmanager
def simulator() -> Iterator[str]:
    """Yield the URL of a simulator. A simulator that was started here ends with the block.

    Raises:
        SimulatorUnavailableError: it does not respond, or did not start.
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        check_simulator(url)
        yield url.rstrip("/")
        return
    with _started() as own:
        yield own


def check_simulator(url: str) -> None:
    """Raise SimulatorUnavailableError unless a simulator responds at a URL."""
    try:
        answer = httpx2.get(f"{url.rstrip('/')}/health", timeout=10.0)
        answer.raise_for_status()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise SimulatorUnavailableError(
            f"no simulator responds at {URL_VARIABLE}={url} ({error}); start one ({BY_HAND}), or unset "
            f"{URL_VARIABLE}"
        ) from None


@contextlib.contextmanager
def _started() -> Iterator[str]:
    """Start the service in a child process, on a free loopback port; it ends with this process, even after a
    kill."""
    command = [
        sys.executable,
        "-m",
        "examples.process_agent.flowsheets.service",
        "--port",
        "0",
        "--until-eof",
    ]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = threading.Timer(START_TIMEOUT_S, process.kill)
        deadline.start()
        try:
            assert process.stdout
            line = process.stdout.readline()
            deadline.cancel()
            if not line.startswith(READY):
                raise SimulatorUnavailableError(
                    f"the simulator did not start within {START_TIMEOUT_S:g} s; try it by hand: {BY_HAND}"
                )
            yield line.removeprefix(READY).strip()
        finally:
            deadline.cancel()
            process.terminate()
