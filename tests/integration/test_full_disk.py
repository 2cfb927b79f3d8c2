"""A disk that becomes full during a run: one typed error, nothing recorded is lost, and the run resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "full_disk_run.py"
MOUNT = "mount -t tmpfs -o size=64m tmpfs {folder} && exec {python} {program} {folder} {left}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount a small disk"
)
@pytest.mark.parametrize(
    ("left", "files"), [(0, "store.db"), (1_500_000, "state|store.db")], ids=["store", "state"]
)
def test_a_run_resumes_after_its_disk_was_full(
    tmp_path: Path, left: int, files: str, kill_leftover_proxies: None
) -> None:
    """With 1.5 MB left a training state fills the disk; if the store writes meanwhile, it fails first."""
    command = MOUNT.format(folder=tmp_path, python=sys.executable, program=PROGRAM, left=left)
    run = subprocess.run(
        ["unshare", "-m", "bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")] or [run.stdout]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["error"] == "DiskError", result
    assert re.search(f"{tmp_path}/run/({files})", result["message"]), result
    assert "MiB are free on its disk" in result["message"]
    assert (result["steps"], result["logged"]) == (4, [1, 2, 3, 4])
