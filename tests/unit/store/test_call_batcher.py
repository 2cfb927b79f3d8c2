"""Messages that are sent again, as Ray does when the store's actor died after it had committed and before it
had answered."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from store_helpers import Box, call_of, ids_of, open_box, reward_of, span_of
from unit_helpers import make_generation

from raylight.errors import DiskError, StoreError, StoreLostError, UnknownIdError
from raylight.store.call_rows import generation_bytes
from raylight.store.client import StoreClient
from raylight.store.payloads import encode_payload
from raylight.store.rows import new_id, request_row, span_row
from raylight.store.service import StoreService
from raylight.types import EnqueueRolloutRequest


class Resending(StoreClient):
    """Every message reaches the store twice, and the second answer is the one that arrives.

    Args:
        between: what happens before the second time.
    """

    def __init__(self, service: StoreService, between: Any = None) -> None:
        super().__init__(service)
        self.between = between
        self.answers: list[tuple[Any, Any]] = []
        self._channel.send = self._twice  # type: ignore[method-assign]

    async def _twice(self, method: str, *args: Any) -> Any:
        first = await getattr(self._channel.target, method)(*args)
        if method == "call":
            if self.between is not None:
                await self.between()
            again = await self._channel.target.call(*args)
            self.answers.append((first, again))
            return again
        return first


async def test_a_span_that_is_sent_again_is_answered_again(box: Box) -> None:
    store = Resending(box.service)
    rollout = await box.take()
    span = span_of(rollout)
    assert await store.add_span(span) == span.model_copy(update={"sequence_id": 1})
    assert await store.add_span(span) is None, "a second message of the same span is another thing"
    assert [
        s.sequence_id for s in await store.add_many_spans([span_of(rollout), span, span_of(rollout)])
    ] == [2, 3]
    assert (await box.count("total_spans"), await box.count("spans_duplicate")) == (3, 2)
    assert [await store.get_next_span_sequence_id(*ids_of(rollout)) for _ in range(2)] == [4, 5]


async def test_what_was_queued_again_by_hand_is_not_taken_from_who_has_it(box: Box) -> None:
    rollout = await box.take()
    await box.store.finish_attempt(rollout, "succeeded")
    taken = []

    async def dequeue() -> None:
        taken.append(await box.again("v"))

    store = Resending(box.service, dequeue)
    assert (await store.update_rollout(rollout.rollout_id, status="requeuing")).status == "requeuing"
    assert await box.status(rollout) == ("preparing", "preparing")
    assert (await box.store.finish_attempt(taken[0], "succeeded")).attempt.sequence_id == 2
    assert await box.store.dequeue_rollout() is None


async def test_an_older_value_does_not_come_back(box: Box) -> None:
    update = await box.store.add_resources({"n": 1})

    async def newer() -> None:
        await box.store.update_resources(update.resources_id, {"n": 3})

    answered = await Resending(box.service, newer).update_resources(update.resources_id, {"n": 2})
    assert (answered.version, answered.resources) == (2, {"n": 2})
    latest = await box.store.get_latest_resources()
    assert (latest.version, latest.resources) == (3, {"n": 3})


async def test_a_worker_that_was_released_is_not_released_again(box: Box) -> None:
    for _ in range(3):
        await box.take("w")
    assert await Resending(box.service).release_worker("w", "died") == 3


async def test_errors_are_answered_again_too(box: Box) -> None:
    store = Resending(box.service)
    results = await asyncio.gather(
        store.update_worker("w"),
        store.cancel_rollout("ro-none"),
        store.update_worker("v"),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == ["Worker", "UnknownIdError", "Worker"]
    with pytest.raises(UnknownIdError, match="ro-none"):
        await store.cancel_rollout("ro-none")


async def test_every_kind_of_message_may_come_twice(box: Box) -> None:
    """The second is not carried out: the answer is the same, and nothing in the file changes."""
    request = request_row(EnqueueRolloutRequest(input=1, rollout_id="mine"))
    ((is_new, first),) = await box.service.enqueue([request])
    assert is_new
    assert await box.service.enqueue([request]) == [(False, first)]
    (taken,) = await box.service.dequeue("w", 1, 0, "req")
    rollout = await box.store.get_rollout_by_id(taken[0])
    key = call_of(rollout)
    made = make_generation([1], [2], key=key)
    opened = (*ids_of(rollout), key.call_id, 0.0, "recorder", "request")
    closed = (*ids_of(rollout), key.call_id, None, 0, generation_bytes(made), 1, span_row(span_of(rollout)))
    await box.service.enqueue(
        [request_row(EnqueueRolloutRequest(input=None, rollout_id="place", group_id="g"))]
    )
    resources_id, session_id = new_id("rs"), new_id("se")
    messages: list[list[Any]] = [
        ["start_rollout", request_row(EnqueueRolloutRequest(input=2)), new_id("at"), "w"],
        ["start_attempt", (await box.store.start_rollout(1)).rollout_id, new_id("at"), "w"],
        ["add_resources", resources_id, encode_payload({"a": 1})],
        ["update_resources", resources_id, encode_payload({"a": 2})],
        ["record_step", "lineage", 1, "[[0], []]"],
        ["begin_session", session_id, encode_payload(3), None],
        ["session_state", session_id],
        ["renew_session", session_id],
        ["capture", [opened], [closed]],
        ["check_budgets", *ids_of(rollout), {}],
        ["truncation", *ids_of(rollout)],
        ["lose_recorder", "another"],
        ["add_spans", [span_row(span_of(rollout))]],
        ["next_sequence_ids", [ids_of(rollout)]],
        ["update_attempt", *ids_of(rollout), {"worker_id": "v"}],
        ["update_worker", "w", '{"cpu": 1}', [ids_of(rollout)[1]]],
        [
            "finish_attempt",
            *ids_of(rollout),
            {"status": "succeeded", "failure": None},
            [span_row(span_of(rollout))],
            False,
            {"spans_dropped": 2},
        ],
        ["grade", [span_row(reward_of(rollout, 1.0))]],
        ["update_rollout", "mine", {"status": "requeuing"}],
        ["cancel", ["mine"], False],
        ["report_outage", "policy", 0.0, "nothing listens"],
        ["stop_time"],
        ["continue_time"],
        ["retire_worker", "w"],
        ["release_worker", "w", "died"],
    ]
    assert {message[0] for message in messages} == set(box.service._methods)
    for number, (name, *args) in enumerate(messages, start=1):
        before = await box.service.call([(name, tuple(args))], "lane", number)
        content = dump(box)
        box.clock.jump(1)
        assert await box.service.call([(name, tuple(args))], "lane", number) == before, name
        assert all(succeeded for succeeded, _ in before), before
        assert dump(box) == content, name
    assert await box.count("generations") == 1


class Gone:
    """Handle of an actor that died."""

    def __init__(self, message: str) -> None:
        self._error = RayActorError(error_msg=message)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=self._remote)

    async def _remote(self, *args: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            "died in its creation task\n  raylight.errors.DiskError: /d/s.db cannot be written: full",
            DiskError,
        ),
        ("The actor died because its node is dead.", StoreLostError),
    ],
)
async def test_a_store_that_is_gone_for_good(message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^(/d/s\.db cannot be written|the store actor is gone: The actor)"):
        await StoreClient(Gone(message)).statistics()


def dump(box: Box) -> list[str]:
    return list(box.service._journal.db.iterdump())


async def test_messages_outlive_the_store(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box:
        rollout = await box.take()
        message = [("add_spans", ([span_row(span_of(rollout))],))]
        assert await box.service.call(message, "lane", 7) == [(True, [1])]
    async with open_box(tmp_path / "s.db") as box:
        assert await box.service.call(message, "lane", 7) == [(True, [1])]
        assert await box.service.call(message, "lane", 8) == [(True, [None])]
        assert await box.service.call(message, "another", 7) == [(True, [None])]


async def test_a_message_that_failed_as_a_whole_is_carried_out_the_second_time(box: Box) -> None:
    message = [("update_worker", ("w", None, None))]
    db = box.service._journal.db
    db.execute("CREATE TRIGGER bad BEFORE INSERT ON clients BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(StoreError, match="no room"):
        await box.service.call(message, "lane", 1)
    db.execute("DROP TRIGGER bad")
    assert await box.store.query_workers() == []
    assert (await box.service.call(message, "lane", 1))[0][0]
    assert len(await box.store.query_workers()) == 1


async def test_a_message_that_comes_after_the_next_one_is_refused(box: Box) -> None:
    """Its sender has given it up, and its content is outdated."""
    (rollout_id,) = await box.enqueue()
    await box.service.call([("update_rollout", (rollout_id, {"mode": "val"}))], "lane", 2)
    with pytest.raises(StoreError, match="message 1 of a client arrived after its message 2"):
        await box.service.call([("update_rollout", (rollout_id, {"mode": "train"}))], "lane", 1)
    assert (await box.store.get_rollout_by_id(rollout_id)).mode == "val"


async def test_lanes_are_numbered_apart_and_kept_once_each(box: Box) -> None:
    clients = [StoreClient(box.service) for _ in range(3)]
    for client in clients:
        for _ in range(4):
            await client.update_worker("w")
    rows = box.service._journal.execute("SELECT number FROM clients").fetchall()
    assert rows == [(4,)] * 3
    other = await asyncio.to_thread(lambda: len({client._channel for client in clients}))
    assert other == 3
    await box.service.call([("update_worker", ("w", None, None))])
    assert len(box.service._journal.execute("SELECT number FROM clients").fetchall()) == 3, (
        "a message without a lane leaves nothing"
    )
