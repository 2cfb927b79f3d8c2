"""The main job without HAProxy, /proc and the calls that only Linux has, as on macOS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray_cluster
from programs import run_python

HIDDEN = Path(ray_cluster.__file__).parent / "without_linux"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_completes_with_serve_s_own_proxy(tmp_path: Path, no_processes_left: None) -> None:
    path = os.pathsep.join([str(HIDDEN), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "raylight.cli", "quickstart", "--steps", "1", "--output-dir", tmp_path]
    done = run_python(*command, timeout_s=580, PYTHONPATH=path)
    output = done.stdout + done.stderr
    assert output.count("has no HAProxy (Could not find an HAProxy binary)") == 1, output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts_lost"]) == (1, 0)


@pytest.mark.slow
def test_the_hidden_calls_are_hidden_from_raylight_only() -> None:
    script = (
        "import os, psutil; from raylight._utils.machine import available_cpus, write_problem\n"
        "from pathlib import Path\n"
        "assert not hasattr(os, 'pidfd_open') and not hasattr(os, 'sched_getaffinity')\n"
        "from raylight.ui import run_folder\n"
        "from raylight.sandboxes.marked_processes import _marked\n"
        "assert _marked('x') == ([], True), 'no /proc'\n"
        "assert psutil.Process().cmdline() and Path('/proc/self/stat').exists()\n"
        "print(available_cpus())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HIDDEN), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, int(done.stdout or 0) >= 1) == (0, True), done.stderr
