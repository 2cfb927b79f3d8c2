"""Grafana's board against Prometheus and a run in progress."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from raylight.ray_metrics.table import BOARD
from raylight.serving.local_endpoint import LOOPBACK

DEADLINE_S = 400.0
"""Longest time until every expression has an answer, with the start of the run."""
CONFIG = """
global: {scrape_interval: 2s}
scrape_configs:
- job_name: ray
  file_sd_configs: [{files: ["%s"], refresh_interval: 2s}]
"""


@pytest.fixture
def session() -> Iterator[Path]:
    """Folder of the Ray session of a run in progress; short, as Ray's sockets are in it."""
    folder = tempfile.mkdtemp(prefix="rl")
    command = [sys.executable, "-m", "raylight.cli", "quickstart", "--steps", "400", "--max-staleness", "1"]
    with (
        open(f"{folder}/log", "wb") as log,
        subprocess.Popen(
            [*command, "--output-dir", f"{folder}/run"],
            env=os.environ | {"RAY_TMPDIR": folder},
            stdout=log,
            stderr=log,
        ) as run,
    ):
        yield Path(folder, "ray", "session_latest")
        assert run.poll() is None, Path(folder, "log").read_text()[-4000:]
        run.terminate()
        run.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def prometheus(session: Path, tmp_path: Path) -> Iterator[str]:
    """URL of a Prometheus that reads the run's Ray cluster."""
    with socket.create_server((LOOPBACK, 0)) as free:
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG % (session / "prom_metrics_service_discovery.json"))
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    with subprocess.Popen(["prometheus", *arguments, f"--web.listen-address={address}"]) as server:
        yield f"http://{address}/api/v1/query"
        server.terminate()


def has_data(url: str, expression: str) -> bool:
    expression = expression.replace("$SessionName", ".*").replace("$run", ".*")
    try:
        answer = httpx.get(url, params={"query": expression}, timeout=10)
    except httpx.TransportError:  # it starts
        return False
    assert answer.status_code == 200, (expression, answer.text)
    return any(not math.isnan(float(found["value"][1])) for found in answer.json()["data"]["result"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
def test_every_expression_is_answered_with_data(session: Path, prometheus: str) -> None:
    """The board is the one that the run put next to Ray's."""
    deadline = time.monotonic() + DEADLINE_S
    file = session / "metrics" / "dashboards" / BOARD.name
    while not file.exists():
        assert time.monotonic() < deadline, "the run wrote no board"
        time.sleep(1)
    panels = json.loads(file.read_text())["panels"]
    waiting = {target["expr"] for panel in panels for target in panel.get("targets", ())}
    assert len(waiting) > 30
    while waiting:
        waiting = {expression for expression in waiting if not has_data(prometheus, expression)}
        assert time.monotonic() < deadline, f"without data: {sorted(waiting)}"
        time.sleep(2)
    assert "train_grafana_dashboard.json" in {path.name for path in file.parent.iterdir()}
