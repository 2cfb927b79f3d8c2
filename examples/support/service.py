"""Process of the service, which runs as long as the server does. It needs no torch, unlike `train.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

STOPPED = None, -signal.SIGINT
"""Exit codes of a service that has not ended by itself: it runs, or Ctrl-C ended it and this process too."""


@contextlib.contextmanager
def run_service(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Run the service during the block. If it ends by itself, interrupt the block, then exit."""
    service, done = subprocess.Popen(command, env=os.environ | environment), threading.Event()

    def watch() -> None:
        if service.wait() not in STOPPED and not done.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if service.poll() in STOPPED:
            raise
    finally:
        done.set()
        code = service.poll()
        service.terminate()
        service.wait()
    if code not in STOPPED:
        sys.exit(f"the service ended with code {code}; its message is above")
