"""The JSON of every page, for runs that are recorded, in progress, damaged or hostile."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from recorded_run import HOSTILE, LINEAGE, SECRET, Recorded, record_run, write_metrics
from scripted_models import listening
from store_helpers import Clock, open_box
from unit_helpers import within

from raylight.errors import ConfigError
from raylight.types import EnqueueRolloutRequest
from raylight.ui.app import build_app

ROLLOUT = f"/api/runs/run/rollouts/{LINEAGE}-train-0-0"


@pytest.fixture
async def recorded(tmp_path: Path) -> Recorded:
    return await record_run(tmp_path / "run")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app([folder])
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


@pytest.fixture
async def http(recorded: Recorded) -> AsyncIterator[httpx.AsyncClient]:
    async with opened(recorded.folder.parent) as client:
        yield client


async def get(http: httpx.AsyncClient, path: str, status: int = 200, **query: Any) -> Any:
    answer = await http.get(path, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_runs(http: httpx.AsyncClient) -> None:
    (card,) = (await get(http, "/api/runs"))["runs"]
    assert (card["id"], card["advisories"]) == ("run", 0)
    assert (card["train_reward"], card["val_reward"]) == ([0.5, 0.75], [0.25, 0.25])
    details = await get(http, "/api/runs/run")
    assert details["advisories"] == []
    assert details["settings"]["engine.api_key"] == "***"


async def test_metrics(http: httpx.AsyncClient) -> None:
    columns = (await get(http, "/api/runs/run/metrics", names="train/reward"))["columns"]
    assert columns == {"step": [0, 1, 2], "val/step": [None] * 3, "train/reward": [None, 0.5, 0.75]}


async def test_rollouts_are_filtered_and_searched(http: httpx.AsyncClient) -> None:
    page = await get(http, "/api/runs/run/rollouts", limit=1, sort="reward", order="desc")
    assert (page["total"], page["known"], page["items"][0]["reward"]) == (6, 6, 1.0)
    found = await get(http, "/api/runs/run/rollouts", q="zebra2", mode="train")
    assert [item["id"] for item in found["items"]] == [f"{LINEAGE}-train-1-0"]
    points = await get(http, "/api/runs/run/points", mode="train")
    assert points["columns"]["reward"] == [0.0, 0.25, 0.5, None, None]
    assert set(points["columns"]["mode"]) == {"train"}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"q": '"'}, "is not a query"),
        ({"sort": "x"}, "cannot sort by"),
        ({"limit": "many"}, "limit must be a whole number"),
        ({"limit": "0"}, "limit must be"),
        ({"offset": "-1"}, "offset must be"),
        ({"min_reward": "high"}, "min_reward must be a number"),
    ],
)
async def test_a_wrong_query_is_an_error(http: httpx.AsyncClient, query: dict, message: str) -> None:
    assert message in (await get(http, "/api/runs/run/rollouts", 400, **query))["error"]


async def test_a_rollout(http: httpx.AsyncClient) -> None:
    shown = await get(http, ROLLOUT)
    assert (shown["reward"], shown["advantage"], shown["trained"]) == (0.0, 1.5, True)
    first, second = shown["calls"]
    assert first["messages"][0]["content"] == f"What is 0? {HOSTILE}"
    assert (second["shared_messages"], [m["role"] for m in second["messages"]]) == (2, ["user"])
    assert (second["relation"], second["row"], second["versions"]) == ("continued", 0, [0, 0])
    assert [span["kind"] for span in shown["spans"]] == ["call", "call", "other", "reward"]
    assert shown["rows"] == [{"row": 0, "tokens": 9, "trained": 4, "calls": {"1": 3, "2": 7}}]
    assert (shown["previous"], shown["next"]) == (None, f"{LINEAGE}-train-0-1")


async def test_a_failed_and_an_undecided_rollout(http: httpx.AsyncClient, recorded: Recorded) -> None:
    failed = await get(http, f"/api/runs/run/rollouts/{recorded.failed}")
    assert failed["failure"]["trace"].startswith("Traceback")
    assert failed["attempts"][0]["failure"]["kind"] == "agent"
    undecided = await get(http, f"/api/runs/run/rollouts/{recorded.undecided}")
    assert (undecided["status"], undecided["calls"], undecided["rows"]) == ("queuing", [], [])


async def test_tokens(http: httpx.AsyncClient) -> None:
    page = await get(http, f"{ROLLOUT}/tokens", offset=3, limit=4)
    assert (page["total"], page["rows"], page["offset"]) == (9, 1, 3)
    columns = page["columns"]
    assert columns["id"] == [4, 5, 6, 7]
    assert columns["kind"] == [1, 1, 2, 2]
    assert columns["learner_logprob"] == [-0.5, -0.5, None, None]
    assert columns["advantage"] == [1.5, 1.5, None, None]
    summary = await get(http, f"{ROLLOUT}/token_summary", bins=3)
    assert summary["columns"]["kind"] == pytest.approx([0, 4 / 3, 4 / 3], abs=1e-4)
    assert "no" in (await get(http, f"{ROLLOUT}/tokens", 404, row=5))["error"]


async def test_a_group_and_the_groups_of_an_equal_task(http: httpx.AsyncClient) -> None:
    group = await get(http, f"/api/runs/run/groups/{LINEAGE}-train-0")
    assert (group["step"], group["reward_mean"]) == (1, 0.125)
    assert [item["final"] for item in group["rollouts"]] == [
        "It is zebra0 of turn 1.",
        "It is zebra1 of turn 0.",
    ]
    assert group["rollouts"][0]["said"] == "It is zebra0 of turn 0.\n\nIt is zebra0 of turn 1."
    assert [item["advantage"] for item in group["rollouts"]] == [1.5, None]
    assert [item["group"] for item in group["same_task"]] == [f"{LINEAGE}-train-0", f"{LINEAGE}-val-1-0"]


async def test_failures(http: httpx.AsyncClient, recorded: Recorded) -> None:
    failure = {"kind": "agent", "error": "ValueError: no zebra", "rollouts": 1, "last": recorded.failed}
    assert await get(http, "/api/runs/run/failures") == {"items": [failure]}


async def test_a_request_can_be_repeated(http: httpx.AsyncClient) -> None:
    request = await get(http, f"{ROLLOUT}/calls/call-0-1/request")
    assert [message["role"] for message in request["messages"]] == ["user", "assistant", "user"]
    assert request["curl"].startswith("curl ")
    assert json.loads(json.dumps(request["body"]))["temperature"] == 1.0
    await get(http, f"{ROLLOUT}/calls/none/request", 404)


async def test_raw(http: httpx.AsyncClient) -> None:
    raw = await get(http, f"{ROLLOUT}/raw")
    assert raw["rollout"]["input"]["html"] == HOSTILE
    assert raw["calls"][0]["output_ids_length"] == 2


async def test_workers_and_evaluations(http: httpx.AsyncClient, recorded: Recorded) -> None:
    (worker,) = (await get(http, "/api/runs/run/workers"))["runners"]
    assert worker["id"] == "w"
    assert worker["status"] != "ended"
    (recorded.folder / "summary.json").write_text("{}")
    (worker,) = (await get(http, "/api/runs/run/workers"))["runners"]
    assert (worker["status"], worker["rollout"], worker["stats"]) == ("ended", None, None)
    assert (await get(http, "/api/runs/run/evaluations"))["items"][0]["error"] == 0.1


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/none",
        "/api/runs/run/rollouts/none",
        "/api/runs/run/rollouts/none/tokens",
        "/api/runs/run/groups/none",
        "/api/none",
        "/api/runs/..%2F..%2Fetc",
    ],
)
async def test_what_is_unknown_is_an_error(http: httpx.AsyncClient, path: str) -> None:
    assert (await get(http, path, 404))["error"]


async def test_every_page_has_one_address_and_no_secret(http: httpx.AsyncClient) -> None:
    for path in ("/", "/compare", "/runs/run", f"/runs/run/rollouts/{LINEAGE}-train-0-0"):
        answer = await http.get(path)
        assert answer.headers["content-type"].startswith("text/html")
    for path in ("/api/runs", "/api/runs/run"):
        assert SECRET not in (await http.get(path)).text
    assert (await http.get("/static/../../../pyproject.toml")).status_code in (200, 404)
    assert "build-system" not in (await http.get("/static/..%2F..%2F..%2Fpyproject.toml")).text


async def test_a_run_without_a_store(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("agent: x\n")
    async with opened(tmp_path) as http:
        assert (await get(http, "/api/runs"))["runs"][0]["kind"] == "other"
        name = tmp_path.name
        assert "has no store" in (await get(http, f"/api/runs/{name}/rollouts", 503))["error"]


async def test_a_damaged_store(tmp_path: Path) -> None:
    recorded = await record_run(tmp_path / "run")
    (recorded.folder / "store.db").write_bytes(b"x" * 10_000)
    (recorded.folder / "store.db-wal").unlink(missing_ok=True)
    async with opened(recorded.folder) as http:
        assert (await get(http, "/api/runs"))["runs"][0]["step"] == 2
        assert (await get(http, "/api/runs/run/rollouts", 503))["error"]


async def test_the_store_of_another_run_in_the_directory_is_shown(
    http: httpx.AsyncClient, recorded: Recorded
) -> None:
    before = await get(http, "/api/runs/run/rollouts")
    assert (await get(http, f"{ROLLOUT}/tokens"))["total"]
    for file in recorded.folder.glob("store.db*"):
        file.unlink()
    async with open_box(recorded.folder / "store.db", Clock(1_000.0)) as box:
        await box.store.enqueue_many_rollouts([EnqueueRolloutRequest(input="new", rollout_id="new")])
    after = await get(http, "/api/runs/run/rollouts")
    assert (before["total"], after["total"]) == (6, 1)
    assert [item["id"] for item in after["items"]] == ["new"]
    assert (await get(http, f"{ROLLOUT}/tokens", 404))["error"]


async def test_a_folder_that_is_removed_does_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        await record_run(tmp_path / name)
    app = build_app([tmp_path / "a", tmp_path / "b"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        shutil.rmtree(tmp_path / "a")
        assert "is gone" in (await get(http, "/api/runs/a/rollouts", 503))["error"]
        assert [run["id"] for run in (await get(http, "/api/runs"))["runs"]] == ["b"]
    with pytest.raises(ConfigError, match="there is no folder"):
        build_app([tmp_path / "a"])


async def test_events_of_a_run_that_has_ended_end(recorded: Recorded) -> None:
    (recorded.folder / "summary.json").write_text('{"seconds": NaN}')
    async with opened(recorded.folder) as http:
        answer = await http.get("/api/runs/run/events")
    kinds = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds[-1] == "end"
    assert "NaN" not in answer.text


async def test_events_show_what_is_new(recorded: Recorded) -> None:
    with listening(build_app([recorded.folder])) as url:
        async with (
            within(),
            httpx.AsyncClient() as http,
            http.stream("GET", f"{url}/api/runs/run/events") as answer,
        ):
            lines = answer.aiter_lines()
            events = {}
            async for line in lines:
                if line.startswith("event: "):
                    kind, data = line[7:], await anext(lines)
                    events[kind] = json.loads(data.removeprefix("data: "))
                    if kind == "rollouts":
                        write_metrics(recorded.folder, [{"step": 3, "train/reward": 0.9}])
                    if kind == "metrics" and 0.9 in events[kind]["columns"]["train/reward"]:
                        break
    assert events["run"]["id"] == "run"
    assert events["rollouts"]["known"] == 6
