"""Programs that tests run to their end."""

import os
import subprocess
import sys
from pathlib import Path


def run_python(
    *arguments: object, timeout_s: float, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python, whose local Ray cluster is its own, and require that it succeeds.

    Args:
        environment: further variables.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "RAY_ADDRESS": "local", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done
