"""`raylight serve --learn`, as a user runs it: agents in threads and in other languages open sessions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from docs_snippets import DOCS, snippet, write_files
from outside_agents import SERVER_KEY, Outside, call_anthropic, call_openai
from ray_cluster import CLUSTER_VARIABLE, DEADLINE_S, SESSION, eventually, free_port, processes_with
from run_output import metric_rows
from serve_command import serve

import raylight as rl
from raylight.quickstart import STARTER_MODEL

PAGE = DOCS / "online.md"
PER_STEP = 8
MARK = {CLUSTER_VARIABLE: "sessions", "RAYLIGHT_API_KEY": SERVER_KEY}


class Learning:
    """A server that learns, its agents, and its run directory."""

    def __init__(self, outside: Outside, folder: Path, process: subprocess.Popen[str]) -> None:
        self.outside, self.folder, self.process = outside, folder, process

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def reached(self, step: int) -> Callable[[], bool]:
        return lambda: bool(rows := self.rows()) and rows[-1]["step"] >= step


def serve_learning(folder: Path, port: int, *args: str) -> Any:
    return serve(
        "--model",
        STARTER_MODEL,
        "--learn",
        "--output-dir",
        str(folder),
        "--port",
        str(port),
        "--sessions-per-step",
        str(PER_STEP),
        *args,
        env=MARK,
    )


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    folder = tmp_path_factory.mktemp("online") / "run"
    settings = ("--lease", "3", "--max-sessions", "12", "--set", "algorithm.lr=1e-3")
    with serve_learning(folder, free_port(), *settings) as server, Outside(server.url) as outside:
        learning = Learning(outside, folder, server.process)
        outside.play_until(learning.reached(1))  # whichever tests are chosen, the run has learned something
        yield learning
    check_run(folder)
    eventually(lambda: not processes_with({**SESSION, **MARK}), DEADLINE_S, "the end of the server")


def check_run(folder: Path) -> None:
    """Assert that Ctrl-C left a complete run directory."""
    rows = metric_rows(folder)
    assert {row["ledger/unaccounted"] for row in rows} == {0}
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == len(rows)
    assert (folder / "checkpoint" / "model.safetensors").exists()
    assert (folder / "state" / f"step-{len(rows)}").exists()
    before, after = (
        Path(path, "model.safetensors").read_bytes() for path in (STARTER_MODEL, folder / "checkpoint")
    )
    assert before != after
    rollouts = rl.read_rollouts(folder / "store.db")
    assert any(item.generations and item.reward is not None for item in rollouts)


@pytest.mark.slow
def test_the_model_is_trained_on_sessions(learning: Learning) -> None:
    learning.outside.play_until(learning.reached(3))
    rows = learning.rows()
    # a step without signal changes no weights
    versions = [row["weights/version"] for row in rows if "weights/version" in row]
    assert versions == list(range(1, len(versions) + 1))
    assert versions
    for row in rows:
        assert row["ledger/unaccounted"] == 0
        assert (row["train/rollouts"], row["async/staleness_max"]) == (
            PER_STEP,
            min(row["async/staleness_max"], 2),
        )
        assert row["ledger/trained"] > 0 or row["train/reward_std"] == 0
    assert rows[-1]["sessions/begun"] >= 3 * PER_STEP


@pytest.mark.slow
def test_the_python_of_the_page(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLIGHT_URL", learning.outside.url)
    monkeypatch.setenv("RAYLIGHT_API_KEY", SERVER_KEY)
    names = snippet(PAGE, "python").run()
    rewards: list[float] = []

    def play() -> bool:
        try:
            rewards.append(names["play"](12, 30))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 429:  # no place yet
                raise
        return bool(rewards)

    with names["server"]:
        eventually(play, DEADLINE_S, "a place for a session")
    assert rewards[0] in (0.0, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
def test_the_curl_of_the_page(learning: Learning, tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    env = {**os.environ, "RAYLIGHT_URL": learning.outside.url, "RAYLIGHT_API_KEY": SERVER_KEY}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "session.sh"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert '"status":"rewarded"' in done.stdout


@pytest.mark.slow
def test_wrong_requests(learning: Learning) -> None:
    outside = learning.outside
    begin = f"{outside.url}/v1/sessions"
    for headers in ({}, {"authorization": "Bearer wrong-key-0123456789"}):
        assert httpx.post(begin, json={"task": 1}, headers=headers).status_code == 401
    assert outside.post("/se-unknown/reward", reward=1.0).status_code == 404
    session = outside.begin("wrong")
    path = f"/v1/sessions/{session['session_id']}/reward"
    nan = outside.http.post(path, content='{"reward": NaN}', headers={"content-type": "application/json"})
    assert nan.status_code == 400
    own = httpx.post(f"{outside.url}{path}", json={"reward": 1.0}, headers={"x-api-key": session["api_key"]})
    assert own.status_code == 401, "the key of a session sets no reward"
    call_openai(session, "12+30=")
    outside.reward(session, {"right": 1.0, "short": 0.5})
    outside.reward(session, {"right": 1.0, "short": 0.5})
    assert outside.http.post(path, json={"reward": 0.0}).status_code == 409
    with pytest.raises(openai.APIStatusError, match="finished"):
        call_openai(session, "12+30=")


@pytest.mark.slow
def test_abandoned_sessions_give_their_places_to_others(learning: Learning) -> None:
    """All places are taken, by sessions that nobody keeps; a late reward is used."""
    outside = learning.outside
    taken = []
    while (answer := outside.post("", task="left")).status_code == 201:
        taken.append(answer.json())
        if len(taken) == 1:
            call_anthropic(taken[0], "12+30=")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_place")
    assert len(taken) <= 12
    eventually(lambda: outside.status(taken[0]) == "expired", DEADLINE_S, "the end of a lease")
    assert outside.reward(taken[0], 0.5)["status"] == "rewarded"
    step = learning.rows()[-1]["step"]
    outside.play_until(learning.reached(step + 1))
    row = learning.rows()[-1]
    assert row["sessions/late_used"] >= 1
    assert row["sessions/refused"] >= 1
    assert {outside.status(session) for session in taken[1:]} == {"abandoned"}
    late = outside.post(f"/{taken[1]['session_id']}/reward", reward=1.0).json()
    assert (late["status"], late["reward_used"]) == ("abandoned", False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="node or npm is missing")
def test_the_javascript_of_the_page(learning: Learning, tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    env = {**os.environ, "RAYLIGHT_URL": learning.outside.url, "RAYLIGHT_API_KEY": SERVER_KEY}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    learning.outside.play_until(learning.reached(1))
    run("npm", "install", "--no-audit", "--no-fund", "openai@6")
    assert run("node", "session.mjs").strip() == "rewarded"


@pytest.mark.slow
@pytest.mark.usefixtures("kill_leftover_proxies")
def test_a_killed_server_goes_on_with_open_sessions(tmp_path: Path) -> None:
    folder, port = tmp_path / "run", free_port()
    with serve_learning(folder, port) as server, Outside(server.url) as outside:
        run = Learning(outside, folder, server.process)
        outside.play_until(run.reached(1))
        rewarded, left = outside.begin("rewarded"), outside.begin("left")
        for session in (rewarded, left):
            call_openai(session, "12+30=")
        outside.reward(rewarded, 0.5)
        steps = len(run.rows())
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serve_learning(folder, port, "--resume") as server, Outside(server.url) as outside:
        run = Learning(outside, folder, server.process)
        assert outside.status(rewarded) == "rewarded"
        assert outside.reward(left, 1.0)["status"] == "rewarded", "it was open, or had expired meanwhile"
        outside.play_until(run.reached(steps + 2))
        rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["ledger/unaccounted"] for row in rows} == {0}
    trained = {
        item.rollout.input: item.reward
        for item in rl.read_rollouts(folder / "store.db")
        if isinstance(item.rollout.input, str)
    }
    assert trained == {"rewarded": 0.5, "left": 1.0}


@pytest.mark.slow
def test_additions_are_learned_online(tmp_path: Path) -> None:
    """REINFORCE++ on single sessions: the mean reward rises from about 0.5 to 0.75 and more."""
    settings = ("--max-sessions", "256", "--set", "algorithm.lr=2e-4", "--sessions-per-step", "128")
    folder = tmp_path / "run"
    with serve_learning(folder, free_port(), *settings) as server, Outside(server.url) as outside:
        run = Learning(outside, folder, server.process)
        outside.play_until(run.reached(10), threads=32)
        rewards = [row["train/reward"] for row in run.rows()]
    first, last = rewards[0], sum(rewards[-2:]) / 2
    print(f"reward {first:.3f} -> {last:.3f}", file=sys.stderr)
    assert first < 0.65  # three standard errors of 128 sessions
    assert last >= 0.75
