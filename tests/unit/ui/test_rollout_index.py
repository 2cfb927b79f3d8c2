"""The index follows a store: lines, texts, steps and ages; filters, order and search."""

import json
import sqlite3
from pathlib import Path

import pytest
from recorded_run import LINEAGE, Recorded, record_run
from store_helpers import open_box, reward_of, span_of

from raylight.errors import QueryError
from raylight.semconv import (
    ANNOTATION,
    CALL_ID,
    DIALECT,
    GRADE_SPAN_ID,
    INPUT_MESSAGES,
    reward_attributes,
)
from raylight.store.overview import group_name
from raylight.types import EnqueueRolloutRequest, StepGroups
from raylight.ui import rollout_index
from raylight.ui.rollout_index import INDEX_FILE, MARK_END, MARK_START, RolloutIndex, open_index

VERSIONS = {1: 0, 2: 1}


@pytest.fixture
async def recorded(tmp_path: Path) -> Recorded:
    return await record_run(tmp_path / "run")


@pytest.fixture
def index(recorded: Recorded):
    opened = RolloutIndex(recorded.folder / "store.db", recorded.folder)
    complete(opened)
    yield opened
    opened.close()


def complete(index: RolloutIndex) -> None:
    for _ in range(100):
        index.refresh(VERSIONS)
        if index.is_complete:
            return
    raise AssertionError("the index is not complete after 100 parts")


def ids(index: RolloutIndex, **filters: object) -> list[str]:
    return [card["id"].removeprefix(f"{LINEAGE}-") for card in index.find(filters)[1]]


def test_cards_have_what_the_store_has(index: RolloutIndex, recorded: Recorded) -> None:
    total, cards = index.find({})
    assert total == 6
    first, failed = cards[0], cards[3]
    assert first["id"] == recorded.multi_turn
    assert (first["mode"], first["step"], first["group"]) == ("train", 1, f"{LINEAGE}-train-0")
    assert (first["reward"], first["tokens"], first["calls"], first["seconds"]) == (0.0, 4, 2, 0.5)
    assert failed["failure"] == {"kind": "agent", "error": "ValueError: no zebra"}
    assert cards[5]["status"] == "queuing"
    assert cards[5]["seconds"] is None
    assert '"question": "What is 0?"' in first["task"]


def test_ages_are_those_at_the_update(index: RolloutIndex) -> None:
    assert [card["age"] for card in index.find({})[1]] == [0, 0, 1, 1, None, None]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"mode": "val"}, ["val-1-0-0"]),
        ({"step": 2}, ["train-1-0", "train-1-1"]),
        ({"group": f"{LINEAGE}-train-0"}, ["train-0-0", "train-0-1"]),
        ({"status": "failed"}, ["train-1-1"]),
        ({"failure": "agent"}, ["train-1-1"]),
        ({"min_reward": 0.5}, ["train-1-0", "val-1-0-0"]),
        ({"max_reward": 0.25, "mode": "train"}, ["train-0-0", "train-0-1"]),
        ({"q": "zebra2"}, ["train-1-0"]),
        ({"q": "error: zebra"}, ["train-1-1"]),
        ({"q": "zebra1 OR zebra2", "step": 1}, ["train-0-1"]),
        ({"q": "nothing"}, []),
    ],
)
def test_filters(index: RolloutIndex, filters: dict, found: list[str]) -> None:
    assert ids(index, **filters) == found


def test_search_marks_its_matches(index: RolloutIndex) -> None:
    (card,) = index.find({"q": "zebra2"})[1]
    assert f"{MARK_START}zebra2{MARK_END}" in card["snippet"]


def test_order_and_pages(index: RolloutIndex) -> None:
    total, cards = index.find({}, sort="reward", order="desc", limit=2, offset=1)
    assert total == 6
    assert [card["reward"] for card in cards] == [0.5, 0.25]
    without_reward = index.find({}, sort="reward", order="desc")[1][-2:]
    assert [card["reward"] for card in without_reward] == [None, None]


@pytest.mark.parametrize("query", ['"', "a AND", "nosuchcolumn: a", "*"])
def test_a_wrong_query_is_an_error(index: RolloutIndex, query: str) -> None:
    with pytest.raises(QueryError, match="is not a query"):
        index.find({"q": query})


def test_points_are_sampled_evenly(index: RolloutIndex) -> None:
    total, columns = index.points({}, 3)
    assert total == 6
    assert [name.removeprefix(f"{LINEAGE}-") for name in columns["id"]] == [
        "train-0-1",
        "train-1-1",
        "train-2-0",
    ]
    assert index.points({"mode": "none"}, 10)[1]["reward"] == []


async def test_points_of_a_filter_are_sampled_evenly_wherever_its_rollouts_are(tmp_path: Path) -> None:
    modes = ["val" if number % 4 == 0 else "train" for number in range(40)]
    async with open_box(tmp_path / "store.db") as box:
        requests = [EnqueueRolloutRequest(input={}, mode=mode) for mode in modes]
        await box.store.enqueue_many_rollouts(requests)
    index = RolloutIndex(tmp_path / "store.db", tmp_path)
    complete(index)
    for mode in ("val", "train"):
        matching = [card["id"] for card in index.find({"mode": mode})[1]]
        assert (
            index.points({"mode": mode}, 5)[1]["id"] == matching[len(matching) // 5 - 1 :: len(matching) // 5]
        )
    index.close()


async def test_halves_of_characters_are_indexed(tmp_path: Path) -> None:
    asked = json.dumps([{"role": "user", "content": "giraffe \ud83d"}])
    async with open_box(tmp_path / "store.db") as box:
        requests = [EnqueueRolloutRequest(input=task) for task in ("zebra \ud83d", {"animal": "\ud83d"})]
        await box.store.enqueue_many_rollouts(requests)
        rollout = await box.again()
        attributes = {CALL_ID: "call-1", DIALECT: "chat", INPUT_MESSAGES: asked}
        spans = [span_of(rollout, "openai.chat.completion", attributes=attributes)]
        await box.store.finish_attempt(rollout, "succeeded", spans=spans)
    index = RolloutIndex(tmp_path / "store.db", tmp_path)
    complete(index)
    assert [card["task"] for card in index.find({})[1]] == ["zebra ?", '{"animal": "?"}']
    assert index.find({"q": "zebra giraffe"})[0] == 1
    index.close()


def test_groups_of_an_equal_task(index: RolloutIndex) -> None:
    assert [(item["group"], item["mode"]) for item in index.same_task(f"{LINEAGE}-train-0")] == [
        (f"{LINEAGE}-train-0", "train"),
        (f"{LINEAGE}-val-1-0", "val"),
    ]


def test_neighbours(index: RolloutIndex) -> None:
    assert index.neighbours(1) == (None, f"{LINEAGE}-train-0-1")
    assert index.neighbours(6)[1] is None


async def test_it_follows_a_run_in_progress(tmp_path: Path) -> None:
    async with open_box(tmp_path / "store.db") as box:
        request = EnqueueRolloutRequest(input="a zebra", rollout_id="one")
        await box.store.enqueue_many_rollouts([request])
        index = RolloutIndex(tmp_path / "store.db", tmp_path)
        complete(index)
        assert index.find({})[1][0]["status"] == "queuing"
        assert index.counts() == {"known": 1, "lines": 1, "decided": 0, "indexed": 0}
        rollout = await box.again()
        await box.store.finish_attempt(rollout, "succeeded", spans=[reward_of(rollout, 1.0)])
        complete(index)
        assert index.counts() == {"known": 1, "lines": 1, "decided": 1, "indexed": 1}
        assert index.find({"q": "zebra"})[1][0]["reward"] == 1.0
        for rewards, reward in (({}, None), ({"judge": 0.25}, 0.25)):  # the group reward fails at first
            attributes = reward_attributes(rewards)
            await box.store.grade(
                [span_of(rollout, ANNOTATION, span_id=GRADE_SPAN_ID, attributes=attributes)]
            )
            complete(index)
            assert index.find({})[1][0]["reward"] == reward
        index.close()


@pytest.mark.parametrize("resumed", ["1111bbbb", "9999bbbb"])
async def test_steps_of_a_lineage_that_begins_later_are_entered(tmp_path: Path, resumed: str) -> None:
    async with open_box(tmp_path / "store.db") as box:

        async def take_step(lineage: str, step: int) -> None:
            request = EnqueueRolloutRequest(input={}, mode="train", rollout_id=f"{lineage}-train-{step}-0")
            await box.store.enqueue_many_rollouts([request])
            await box.store.record_step(lineage, step, StepGroups((step,)))

        for step in (1, 2, 3):
            await take_step("8888aaaa", step)
        index = RolloutIndex(tmp_path / "store.db", tmp_path)
        complete(index)
        for step in (2, 3):
            await take_step(resumed, step)
        complete(index)
        assert [card["step"] for card in index.find({})[1]] == [1, 2, 3, 2, 3]
        index.close()


def test_an_index_is_used_again_for_its_store_only(recorded: Recorded, tmp_path: Path) -> None:
    store = recorded.folder / "store.db"
    first = RolloutIndex(store, tmp_path)
    complete(first)
    first.close()
    again = RolloutIndex(store, tmp_path)
    assert again.find({})[0] == 6
    again.close()
    other = tmp_path / "other.db"
    other.write_bytes(store.read_bytes())
    db = open_index(tmp_path / INDEX_FILE, other)
    assert db.execute("SELECT COUNT(*) FROM rollouts").fetchone()[0] == 0
    db.close()


def test_a_damaged_index_is_replaced_by_a_temporary_one(recorded: Recorded) -> None:
    (recorded.folder / INDEX_FILE).write_bytes(b"no database" * 1000)
    index = RolloutIndex(recorded.folder / "store.db", recorded.folder)
    complete(index)
    assert index.find({})[0] == 6
    index.close()


def test_long_texts_are_cut(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_index, "MAX_TEXT", 20)
    index = RolloutIndex(recorded.folder / "store.db", tmp_path)
    complete(index)
    index.close()
    with sqlite3.connect(tmp_path / INDEX_FILE) as db:
        lengths = [length for (length,) in db.execute("SELECT LENGTH(messages) FROM texts")]
    assert max(lengths) == 25
    db.close()


def _ids(rollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


def test_groups_of_two_lineages_have_two_names() -> None:
    names = [group_name(f"{lineage}-train-0-1", "train-0") for lineage in ("abcd1234", "ef567890")]
    assert names == ["abcd1234-train-0", "ef567890-train-0"]
    assert group_name("ro-1", "my-group") == "my-group"
    assert group_name("ro-1", None) is None
