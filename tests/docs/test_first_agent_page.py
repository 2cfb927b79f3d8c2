"""The commands and scripts of docs/first_agent.md try, train and score the agent in separate processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_snippets import DOCS, snippet
from programs import run_python

import raylight as rl
from raylight.quickstart import STARTER_MODEL, TOOL_MODEL

PAGE = DOCS / "first_agent.md"
BIN = Path(sys.executable).parent
ENV = {**os.environ, "RAY_ADDRESS": "local"}
START_DEADLINE_S = 120


def write_script(folder: Path, name: str, *blocks: str) -> Path:
    """Write the page's blocks with these names to a file."""
    path = folder / name
    path.write_text("\n\n".join(snippet(PAGE, block).code for block in blocks))
    return path


@pytest.fixture
def served() -> Iterator[str]:
    """Base URL of `raylight serve` as on the page, but on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(BIN / "raylight"),
        "serve",
        "--model",
        STARTER_MODEL,
        "--name",
        "starter",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", server)
        yield f"{url}/v1"
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def wait_for(url: str, server: subprocess.Popen[str]) -> None:
    """Poll a server in another process until it answers."""
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end:
        assert server.poll() is None, server.communicate()[0]
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"{url} did not answer within {START_DEADLINE_S} s")


@pytest.mark.slow
def test_the_agent_is_tried(served: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, "try_it.py", "agent", "rollout", "tasks", "dev")
    code = script.read_text()
    assert code.count("http://127.0.0.1:8000/v1") == 1
    script.write_text(code.replace("http://127.0.0.1:8000/v1", served))
    done = run_python(script.name, cwd=tmp_path, timeout_s=200)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("succeeded") >= 4, done.stdout


@pytest.mark.slow
def test_the_agent_is_trained_and_scored(tmp_path: Path) -> None:
    script = write_script(tmp_path, "my_agent.py", "agent", "rollout", "tasks", "train")
    done = run_python(script.name, cwd=tmp_path, timeout_s=280)
    run = tmp_path / "outputs" / "first"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_before"] < 0.71  # about 0.54, with four standard errors of 128 rollouts
    assert summary["reward_after"] > 0.8
    assert f"{summary['reward_before']:.2f} -> {summary['reward_after']:.2f}" in done.stdout
    shown = [
        line.split()[0] for line in PAGE.read_text().splitlines() if line.startswith("    outputs/first/")
    ]
    assert len(shown) == 5
    assert [path for path in shown if not (tmp_path / path).exists()] == []
    commands = [
        line.strip()
        for line in PAGE.read_text().partition("## 5.")[2].partition("\n## ")[0].splitlines()
        if line.startswith(("    python", "    raylight"))
    ]
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command + (" --limit 16" if "eval" in command else "")],
            cwd=tmp_path,
            env=ENV | {"PATH": f"{BIN}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert len((tmp_path / "val.jsonl").read_text().splitlines()) == 128
    assert "pass@4" in done.stdout


def test_the_tool_model_is_named_as_on_the_page() -> None:
    algorithm = snippet(PAGE, "tools").run({"rl": rl})["algorithm"]
    assert algorithm.model == TOOL_MODEL == rl.quickstart.TOOL_MODEL
