"""The store's client: calls travel together, fail alone, and are carried out once."""

import asyncio
import gc
import logging
import pickle
import threading
import weakref
from typing import Any

import pytest
from store_helpers import BROKEN, Box, begun, ids_of, span_of

from raylight.errors import InvalidTransitionError, RaylightError, StoreError, UnknownIdError
from raylight.store.call_batcher import MAX_BATCH, Channel
from raylight.store.client import UNSET, StoreClient
from raylight.types import EnqueueRolloutRequest, RolloutConfig, RolloutMode

MODES: list[RolloutMode] = ["train", "val", "test"]


# together


class Counted(StoreClient):
    """Counts its messages."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.messages: list[int] = []
        send = self._channel.send

        async def counting(method: str, *args: Any) -> Any:
            if method == "call":
                self.messages.append(len(args[0]))
            return await send(method, *args)

        self._channel.send = counting  # type: ignore[method-assign]


async def test_calls_of_one_turn_travel_in_one_message_and_one_transaction(box: Box) -> None:
    store = Counted(box.service)
    rollout = await box.take()
    statements: list[str] = []
    box.service._journal.db.set_trace_callback(statements.append)
    await asyncio.gather(*[store.add_span(span_of(rollout)) for _ in range(20)], store.update_worker("w"))
    assert store.messages == [21]
    assert statements.count("COMMIT") == 1
    assert [span.sequence_id for span in await store.query_spans(rollout.rollout_id)] == list(range(1, 21))


async def test_a_message_is_bounded(box: Box) -> None:
    store = Counted(box.service)
    await asyncio.gather(*[store.update_worker(f"w{i}") for i in range(MAX_BATCH + 5)])
    assert store.messages == [MAX_BATCH, 5]


async def test_calls_of_one_client_take_effect_in_their_order(box: Box) -> None:
    (rollout_id,) = await box.enqueue()
    calls = [box.store.update_rollout(rollout_id, mode=MODES[i % 3], metadata={"i": i}) for i in range(700)]
    found = await asyncio.gather(*calls)
    assert [state.mode for state in found] == [MODES[i % 3] for i in range(700)]
    assert (await box.store.get_rollout_by_id(rollout_id)).metadata == {"i": 699}


async def test_a_caller_that_gives_up_does_not_disturb_the_others(box: Box) -> None:
    (rollout_id,) = await box.enqueue()
    gone = asyncio.create_task(box.store.update_rollout(rollout_id, mode="val"))
    other = asyncio.create_task(box.store.update_rollout(rollout_id, metadata={"a": 1}))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await other).rollout_id == rollout_id
    assert (await box.store.get_rollout_by_id(rollout_id)).metadata == {"a": 1}


def test_a_client_leaves_nothing_of_an_event_loop_that_is_over() -> None:
    class Target:
        async def call(self, calls: list[Any], lane: str, number: int) -> list[Any]:
            return [(True, None)] * len(calls)

    channel = Channel(Target())
    channel.send = lambda method, *args: getattr(channel.target, method)(*args)  # type: ignore[method-assign]

    async def once() -> weakref.ref[Any]:
        await channel.call("update_worker")
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(once())
    gc.collect(1)  # the objects of this test
    assert loop() is None
    assert len(channel._batchers) == 0


# alone


async def test_a_call_that_fails_undoes_only_itself(box: Box) -> None:
    good, other = await box.take(), await box.take()
    results = await asyncio.gather(
        box.store.add_span(span_of(good)),
        box.store.add_many_spans([span_of(good), span_of(good).model_copy(update={"rollout_id": "ro-none"})]),
        box.store.update_rollout(other.rollout_id, mode="val", status="queuing"),
        box.store.cancel_rollouts([good.rollout_id, "ro-none"]),
        box.store.finish_attempt(other, "succeeded", None, [span_of(other)]),
        box.store.add_span(span_of(good)),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == [
        "Span",
        "UnknownIdError",
        "InvalidTransitionError",
        "UnknownIdError",
        "RolloutState",
        "Span",
    ]
    assert [results[0].sequence_id, results[5].sequence_id] == [1, 2]
    assert (await box.store.get_rollout_by_id(other.rollout_id)).mode is None
    assert await box.status(good) == ("running", "running")
    assert await box.count("total_spans") == 3


ODD_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "not Unicode": ("update_worker", ("w\ud800", None, None)),
    "too large a number": ("update_worker", (2**70, None, None)),
    "not a value": ("update_worker", (object(), None, None)),
    "null": ("update_worker", (None, None, None)),
    "no such method": ("drop_tables", ()),
    "too few arguments": ("update_worker", ()),
    "a wrong type": ("cancel", (5,)),
    "no such column": ("update_rollout", ("ro", {"no_such_column": 1})),
    "broken config": ("update_rollout", ("ro", {"config": "{"})),
}


@pytest.mark.parametrize("odd", ODD_CALLS)
async def test_no_call_harms_those_that_travel_with_it(
    box: Box, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await box.store.enqueue_rollout(1, rollout_id="ro")
    first, wrong, last = await asyncio.gather(
        box.store.update_worker("a"),
        box.store._channel.call(*_spread(ODD_CALLS[odd])),
        box.store.update_worker("b"),
        return_exceptions=True,
    )
    assert isinstance(wrong, StoreError)
    assert [first.worker_id, last.worker_id] == ["a", "b"]
    assert [worker.worker_id for worker in await box.store.query_workers()] == ["a", "b"]
    assert pickle.loads(pickle.dumps(wrong)).args == wrong.args


def _spread(call: tuple[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    return call[0], *call[1]


@pytest.mark.parametrize("fields", [{"rollout_id": "\ud800"}, {"rollout_id": "a\0b"}, {"group_id": "\udfff"}])
async def test_ids_that_are_not_text_are_refused(box: Box, fields: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        await box.store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=1, **fields)]
        )
    assert await box.count("total_rollouts") == 0
    assert len(await box.enqueue()) == 1


@pytest.mark.parametrize("what", ["input", "metadata", "resources", "attempt"])
async def test_what_cannot_be_stored_is_an_error_that_says_what_to_do(box: Box, what: str) -> None:
    rollout, lock = await box.take(), {"lock": threading.Lock()}
    work = {
        "input": lambda: box.store.enqueue_rollout(lock),
        "metadata": lambda: box.store.update_rollout(rollout.rollout_id, metadata=lock),
        "resources": lambda: box.store.add_resources(lock),
        "attempt": lambda: box.store.update_attempt(*ids_of(rollout), metadata=lock),
    }[what]
    with pytest.raises(StoreError, match=r"^\S+\['lock'\] is of the type _thread.lock and cannot"):
        await work()


async def test_the_request_with_a_wrong_input_is_named(box: Box) -> None:
    requests = [EnqueueRolloutRequest(input=value) for value in (1, {"a": [len]})]
    with pytest.raises(StoreError, match=r"^rollouts\[1\].input\['a'\]\[0\] is of the type"):
        await box.store.enqueue_many_rollouts(requests)
    assert await box.count("total_rollouts") == 0


async def test_an_input_travels_with_its_request_and_with_its_lease_only(box: Box) -> None:
    marker = b"the text of a long document"
    store, sent = StoreClient(box.service), []
    send = store._channel.send

    async def recording(method: str, *args: Any) -> Any:
        answer = await send(method, *args)
        if marker in pickle.dumps(answer):
            sent.append(method)
        return answer

    store._channel.send = recording  # type: ignore[method-assign]
    task, config = {"document": marker.decode()}, RolloutConfig(max_attempts=3)
    requests = [EnqueueRolloutRequest(input=task, metadata=task, config=config) for _ in range(3)]
    queued = await store.enqueue_many_rollouts(requests)
    assert queued == await box.store.query_rollouts()
    started = await store.start_rollout(task, metadata=task, mode="val")
    assert started == await box.store.get_rollout_by_id(started.rollout_id)
    ids = [rollout.rollout_id for rollout in queued]
    await store.update_rollout(ids[0], metadata=task)
    await store.cancel_rollout(ids[0])
    assert await store.wait_until_decided(rollout_ids=ids, at_least=1) == ids[:1]
    assert [state.status for state in await store.get_rollout_states(ids)] == ["cancelled"] + ["queuing"] * 2
    assert sent == []
    leased = await store.dequeue_rollout("w")
    assert leased == await box.store.get_rollout_by_id(ids[1])
    await store.finish_attempt(leased, "succeeded")
    assert sent == ["dequeue"]
    again = await store.start_attempt(ids[2])
    assert again == await box.store.get_rollout_by_id(ids[2])
    assert (await store.enqueue_rollout("another", rollout_id=ids[2])).input == task, "it was queued before"
    stored = box.service._journal.execute("SELECT results FROM clients").fetchall()
    assert not any(marker in results for (results,) in stored)


# errors and small things


async def test_errors_are_typed_all_the_way(box: Box) -> None:
    rollout = await box.take()
    await box.store.finish_attempt(rollout, "failed", BROKEN)
    for work, error in (
        (box.store.get_rollout_by_id("ro-none"), UnknownIdError),
        (box.store.update_rollout(rollout.rollout_id, status="running"), InvalidTransitionError),
        (box.store.update_worker("\ud800"), StoreError),
    ):
        with pytest.raises(error) as raised:
            await work
        assert isinstance(raised.value, RaylightError)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_unset_says_what_it_is() -> None:
    assert repr(UNSET) == "UNSET"


async def test_a_client_of_another_process_is_the_same_client() -> None:
    copy = pickle.loads(pickle.dumps(StoreClient("handle")))
    assert copy._channel.target == "handle"


async def test_many_callers_at_once(box: Box) -> None:
    """Producers, workers and watchers together; every rollout is done exactly once."""

    async def work(name: str) -> int:
        done = 0
        while rollouts := await box.store.dequeue_many_rollouts(limit=3, worker_id=name, timeout=0.2):
            for rollout in rollouts:
                await box.store.add_span(span_of(rollout))
                lost = rollout.attempt.sequence_id == 1 and rollout.input % 5 == 0
                await box.store.finish_attempt(
                    rollout, "failed" if lost else "succeeded", BROKEN if lost else None
                )
                done += 1
        return done

    twice = RolloutConfig(max_attempts=2, retry_condition={"failed"})
    working = [await begun(work(f"w{i}")) for i in range(6)]
    produced = await asyncio.gather(
        *[
            box.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i, config=twice) for i in range(20)])
            for _ in range(5)
        ]
    )
    ids = [rollout.rollout_id for rollouts in produced for rollout in rollouts]
    await box.store.wait_until_decided(rollout_ids=ids, timeout=10)
    found = await box.store.get_rollout_states(ids)
    assert [rollout.status for rollout in found] == ["succeeded"] * 100
    assert sum(await asyncio.gather(*working)) == 120
    assert await box.counts() == {
        "total_rollouts": 100,
        "rollouts_succeeded": 100,
        "total_attempts": 120,
        "total_spans": 120,
        "total_workers": 6,
        "attempts_failed_agent": 20,
    }
