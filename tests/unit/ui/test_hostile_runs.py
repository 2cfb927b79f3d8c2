"""Run folders that a stranger made: each is shown without its bad parts, and never stops others."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_run import record_run
from unit_helpers import within

from raylight.ui import workers
from raylight.ui.run_folder import RunFolder
from raylight.ui.workers import DashboardError, check_own

from .test_app import get, opened

DEEP = b"[" * 100_000 + b"]" * 100_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def endless_view(run: Path) -> None:
    with sqlite3.connect(run / "store.db") as db:
        db.execute("ALTER TABLE rollouts RENAME TO kept")
        forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        db.execute(f"CREATE VIEW rollouts AS {forever} SELECT kept.* FROM n, kept")
    db.close()


def fifo(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return make


def written(name: str, content: bytes | str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def metric(value: str) -> Callable[[Path], None]:
    return written("metrics.jsonl", f'{{"step": 1, "train/reward": 0.5, "x": {value}}}\n')


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deep summary": written("summary.json", b'{"a": ' + DEEP + b"}"),
    "deep metric": written("metrics.jsonl", b'{"step": 1, "a": ' + DEEP + b"}\n"),
    "400 digits": metric("9" * 400),
    "5000 digits": metric("9" * 5000),
    "step of 400 digits": written("metrics.jsonl", f'{{"step": {"9" * 400}}}\n'),
    "endless version": written("metrics.jsonl", '{"step": 1, "weights/version": Infinity}\n'),
    "endless evaluation": written("metrics.jsonl", '{"step": 1, "val/step": NaN, "val/reward": 1.0}\n'),
    "summary of another kind": written("summary.json", '{"best": [1], "seconds": {}}'),
    "summary as pipe": fifo("summary.json"),
    "evaluation as pipe": fifo("eval.json"),
    "metrics as pipe": fifo("metrics.jsonl"),
    "settings as pipe": fifo("config.yaml"),
    "alias bomb": written("config.yaml", BOMB),
    "alias of itself": written("config.yaml", "a: &a\n  b: *a\n"),
    "aliases of a long text": written(
        "config.yaml", f"a: &a {'x' * 10**6}\nb: [{', '.join(['*a'] * 10**5)}]\n"
    ),
    "large settings": written("config.yaml", "a: " + "x" * (3 << 20)),
    "endless view": endless_view,
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_one_bad_run_stops_no_other(name: str, tmp_path: Path) -> None:
    await record_run(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    DAMAGE[name](tmp_path / "bad")
    async with opened(tmp_path) as http, within(30):
        cards = {card["id"]: card for card in (await get(http, "/api/runs"))["runs"]}
        assert cards["good"]["val_reward"] == [0.25, 0.25]
        assert "bad" in cards
        pages = ["", "/metrics", "/evaluations", "/rollouts", "/workers", "/failures", "/points"]
        answers = [await http.get(f"/api/runs/bad{page}") for page in pages]
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert all(len(answer.content) < 4 << 20 for answer in answers)
        assert (await get(http, "/api/runs/good/rollouts"))["total"] > 0


def test_a_damaged_run_has_a_card_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "summary.json").write_text('{"best": [1]}')
    card = RunFolder(tmp_path, "run").card()
    assert (card["status"], card["id"], card["spark"]) == ("damaged", "run", [])
    (tmp_path / "summary.json").write_text("{}")
    whole = RunFolder(tmp_path, "run").card()
    assert whole["status"] == "finished"
    assert whole.keys() == card.keys()


# Ray's token


async def test_a_strangers_address_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(workers, "read_actors", lambda *args: called.append(args) or [])
    run = await record_run(tmp_path / "run")
    config = {"run": {"dashboard": "http://127.0.0.1:1", "name": "x"}}
    (run.folder / "config.yaml").write_text(json.dumps(config))
    async with opened(tmp_path) as http:
        shown = await get(http, "/api/runs/run/workers")
        assert (shown["actors"], called) == (None, [])
        assert "set RAY_API_SERVER_ADDRESS" in shown["note"]
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
        assert (await get(http, "/api/runs/run/workers"))["actors"] == []
    assert called == [("http://127.0.0.1:1", "x")]


@pytest.mark.parametrize(
    "address",
    ["http://evil.example:8265", "https://127.0.0.1:1", "http://127.0.0.1", "http://[", 7, {"a": 1}],
)
def test_an_unknown_dashboard_is_refused(address: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    with pytest.raises(DashboardError):
        check_own(address)


@pytest.mark.parametrize("given", ["auto", "local", "10.0.0.1:6379", "ray://10.0.0.1:10001", "http:"])
@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "auto",
        "//127.0.0.1:1",
        "evil.example:8265",
        "ray://10.0.0.1:10001",
        "http:",
        "http:///x",
    ],
)
def test_an_address_without_scheme_or_host_equals_none(
    address: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(DashboardError, match="not an address"):
        check_own(address)


def test_a_dashboard_of_this_user_is_known(tmp_path: Path) -> None:
    program = tmp_path / workers.DASHBOARD_PROGRAM
    program.parent.mkdir(parents=True)
    program.write_text(
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\ninput()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline())
        check_own(f"http://127.0.0.1:{port}")
        check_own(f"http://localhost:{port}")
        with pytest.raises(DashboardError):
            check_own(f"http://evil.example:{port}")
        process.communicate("\n")
    with pytest.raises(DashboardError):
        check_own(f"http://127.0.0.1:{port}")
