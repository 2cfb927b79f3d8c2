"""`raylight ui` of a run, in a separate process, so that it takes no time of the driver's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

STOP_TIMEOUT_S = 5.0
ADDRESS = "the run is shown at "
"""Beginning of the line with the address, which `raylight ui --until-closed` prints."""


@contextlib.contextmanager
def ui_process(
    folder: Path, show: Callable[[str], None], dashboard: str | None = None
) -> Iterator[Future[str]]:
    """Serve the pages of a run on loopback during the block; yield their address once they are served.

    Args:
        show: receives the line with the address, or why there is none. It is called in another thread.
        dashboard: address of the cluster's dashboard, which the pages may call.
    """
    command = [sys.executable, "-m", "raylight.cli", "ui", str(folder), "--until-closed"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ({"RAY_API_SERVER_ADDRESS": dashboard} if dashboard else {}),
    )
    address: Future[str] = Future()

    def forward() -> None:
        assert process.stdout is not None
        for line in map(str.rstrip, process.stdout):
            show(line)
            if line.startswith(ADDRESS):
                address.set_result(line.removeprefix(ADDRESS))
        if not address.done():
            address.cancel()

    reader = threading.Thread(target=forward, name="raylight-ui", daemon=True)
    reader.start()
    try:
        yield address
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # it ends with its input, even if the driver is killed
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(STOP_TIMEOUT_S)
