"""Sessions: attempts of agents outside the run, at places that the run offers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from store_helpers import Box, open_box
from unit_helpers import within

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.client import Session
from raylight.types import EnqueueRolloutRequest, Failure, FailureKind, RolloutConfig, Span

LEASE = RolloutConfig(unresponsive_seconds=60.0, infrastructure_retries=0)


async def offer(box: Box, groups: int, size: int = 1) -> None:
    await box.store.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest(
                input=None,
                mode="train",
                config=LEASE,
                group_id=f"train-{group}",
                rollout_id=f"run-train-{group}-{number}",
            )
            for group in range(groups)
            for number in range(size)
        ]
    )


async def begin(box: Box, task: Any = "task", group: str | None = None) -> Session:
    session = await box.store.begin_session(task, group)
    assert session is not None, "the store has no room"
    return session


async def reward(box: Box, session: Session, value: float = 1.0) -> str:
    ids = {"rollout_id": session.state.rollout_id, "attempt_id": session.session_id}
    values = dict(reward_attributes({"primary": value}))
    span = Span.from_attributes(name=ANNOTATION, attributes=values, **ids)
    await box.store.finish_attempt(session.state, "succeeded", spans=[span])
    return (await box.store.get_session(session.session_id)).state.status


async def test_a_session_takes_the_oldest_place_and_brings_the_task(box: Box) -> None:
    await offer(box, 2)
    first, second = await begin(box, {"a": 1}), await begin(box, {"a": 2})
    assert [s.state.rollout_id for s in (first, second)] == ["run-train-0-0", "run-train-1-0"]
    assert await box.store.begin_session("more") is None
    assert await reward(box, first) == "succeeded"
    (item,) = await box.store.collect(["run-train-0-0"])
    assert (item.rollout.input, item.reward, item.rollout.group_id) == ({"a": 1}, 1.0, "train-0")
    counts = await box.counts()
    assert (counts["sessions_begun"], counts["sessions_refused"]) == (2, 1)


async def test_a_repeated_request_gets_the_same_session(box: Box) -> None:
    await offer(box, 2)
    call = ("begin_session", ("se-1", b"\xa1t", None))
    (_, first), (_, again) = await box.service.call([call, call])
    assert first == again
    assert (await box.counts())["rollouts_queuing"] == 1


async def test_a_named_group_keeps_its_task(box: Box) -> None:
    await offer(box, 2, size=2)
    a, b = await begin(box, "x", "a"), await begin(box, "y", "b")
    assert {a.state.rollout_id, b.state.rollout_id} == {"run-train-0-0", "run-train-1-0"}
    with pytest.raises(InvalidTransitionError, match="another task"):
        await box.store.begin_session("y", "a")
    assert (await begin(box, "x", "a")).state.rollout_id == "run-train-0-1"
    assert await box.store.begin_session("x", "a") is None, "the other places belong to b"
    found = await box.store.query_rollouts(rollout_id_contains="train-0-")
    assert {rollout.group_id for rollout in found} == {"session:train-0:a"}


@pytest.mark.parametrize("name", ["a", "a:b", "100%", "_", "train-0:a"])
async def test_a_name_that_is_used_again_names_another_group(box: Box, name: str) -> None:
    """The rewards of the two are not compared with one another, and their tasks may differ."""
    await offer(box, 3, size=2)
    sessions = [await begin(box, task, name) for task in ("x", "x", "y")]
    other = await begin(box, "y", "x")
    assert (await begin(box, "y", name)).state.rollout_id == "run-train-1-1"
    groups = [session.state.group_id for session in [*sessions, other]]
    ids = [f"session:train-{number}:{name}" for number in (0, 0, 1)]
    assert groups == [*ids, "session:train-2:x"]


async def test_equal_tasks_may_have_their_fields_in_another_order(box: Box) -> None:
    await offer(box, 1, size=2)
    await begin(box, {"a": 1, "b": 2}, "g")
    assert (await begin(box, {"b": 2, "a": 1}, "g")).state.rollout_id == "run-train-0-1"


async def test_calls_and_heartbeats_keep_a_session(box: Box) -> None:
    await offer(box, 1)
    session = await begin(box)
    for _ in range(3):
        await box.pass_time(50)
        renewed = await box.store.renew_session(session.session_id)
        assert renewed.expires == box.clock.now + 60
    assert renewed.state.status == "running"
    await box.pass_time(61)
    expired = await box.store.get_session(session.session_id)
    assert (expired.state.status, expired.state.attempt.status) == ("failed", "unresponsive")
    assert (await box.store.renew_session(session.session_id)).state.status == "running"


async def test_a_late_reward_decides_an_expired_session(tmp_path: Path) -> None:
    """It does so even after a restart of the store, which has it in its file."""
    async with open_box(tmp_path / "s.db") as box:
        await offer(box, 1)
        session = await begin(box)
        await box.pass_time(61)
        ids = [session.state.rollout_id]
        assert await box.store.wait_until_decided(rollout_ids=ids) == ids, "it failed"
        waiting = asyncio.create_task(box.store.wait_until_final(ids))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await reward(box, session, 0.5) == "succeeded"
        async with within(10):
            await waiting
    async with open_box(tmp_path / "s.db") as box:
        assert [item.reward for item in await box.store.collect(ids)] == [0.5]


async def test_a_reward_after_the_end_changes_nothing(box: Box) -> None:
    await offer(box, 2)
    session = await begin(box)
    await reward(box, session, 0.5)
    await reward(box, session, 1.0)
    assert [item.reward for item in await box.store.collect([session.state.rollout_id])] == [0.5]
    given_up = await begin(box)
    ids = given_up.state.rollout_id, given_up.session_id
    failure = Failure(kind="unresponsive", error="Abandoned: too old")
    await box.store.update_attempt(*ids, status="failed", failure=failure)
    assert await reward(box, given_up) == "failed"
    assert (await box.counts())["attempts_late"] == 1


@pytest.mark.parametrize("kind", ["agent", "cancelled"])
async def test_an_expired_session_that_fails_is_decided_for_good(box: Box, kind: FailureKind) -> None:
    """Its rollout has failed before, and does not change again."""
    await offer(box, 1)
    session = await begin(box)
    await box.pass_time(61)
    waiting = asyncio.create_task(box.store.wait_until_final([session.state.rollout_id]))
    await asyncio.sleep(0.01)
    await box.store.finish_attempt(session.state, "failed", Failure(kind=kind, error="it ended"))
    async with within(10):
        await waiting


async def test_an_unknown_session(box: Box) -> None:
    for method in (box.store.get_session, box.store.renew_session):
        with pytest.raises(UnknownIdError, match="no session 'se-9'"):
            await method("se-9")
