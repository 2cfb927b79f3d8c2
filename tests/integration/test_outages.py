"""The ingress of a run is killed while agents call the model, and each agent hides the error that it gets."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from ray_cluster import BIN, eventually

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions

AGENT = '''
import os
from pathlib import Path

import raylight as rl
from raylight.quickstart.additions import question

LOG = Path(__file__).with_name("log")


@rl.rollout
async def hides_errors(task, llm):
    """Return 1, or -1 if a call failed."""
    with LOG.open("a") as log:
        log.write("begun\\n")
    model = llm.client().with_options(max_retries=0)
    try:
        for _ in range(5):
            await model.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": question(task)}], max_tokens=8
            )
    except Exception:
        with LOG.open("a") as log:
            log.write("failed\\n")
        return -1.0
    return 1.0
'''
N_TASKS, SAMPLES = 16, 24


def proxies_of(driver: int) -> list[psutil.Process]:
    """Return the HAProxy processes among the descendants of a driver."""
    return [
        process for process in psutil.Process(driver).children(recursive=True) if process.name() == "haproxy"
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_no_result_of_an_outage_counts(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENT)
    log = tmp_path / "log"
    log.touch()
    tasks = additions(0)[1][:N_TASKS]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    command = [BIN / "raylight", "eval", "agents:hides_errors", "--model", STARTER_MODEL]
    command += ["--data", "val.jsonl", "--samples", str(SAMPLES), "--output-dir", "out"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        try:
            begun = N_TASKS * SAMPLES // 4
            eventually(lambda: log.read_text().count("begun") >= begun, 120, "the first quarter of rollouts")
            proxies = proxies_of(driver.pid)  # during a reload there are two
            assert proxies
            for proxy in proxies:
                proxy.kill()
            printed, _ = driver.communicate(timeout=150)
        finally:
            driver.kill()
    assert driver.returncode == 0, printed
    assert "serving is away since" in printed
    assert "serving is back after" in printed
    assert "failed" in log.read_text(), "no agent noticed the outage"
    rows = [json.loads(line) for line in (tmp_path / "out" / "eval.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["succeeded"] * (N_TASKS * SAMPLES)
    assert {row["reward"] for row in rows} == {1.0}
