"""Transfers: their members execute phases together, and one that is lost in any phase is left out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coordinator_helpers import (
    Coordinator,
    Life,
    Replica,
    RunningReplica,
    Versions,
    changed,
    join,
    publish_weights,
    send,
    turns,
)
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.errors import TransferBrokenError, WeightSyncError
from raylight.weights import coordinator as module
from raylight.weights import quorum
from raylight.weights.orders import Member, Phase, ReplicaReport, Snapshot, Task, TaskAnswer

PHASES: tuple[Phase, ...] = ("init", "start", "update", "finish")
TOKEN = "a publication"


@asynccontextmanager
async def running(coordinator: Coordinator, *names: str) -> AsyncIterator[list[RunningReplica]]:
    replicas = [RunningReplica(coordinator, name) for name in names]
    async with within():
        for replica in replicas:
            await replica.start()
        yield replicas
    await cancel_all([replica.task for replica in replicas if replica.task])


async def test_all_replicas_execute_the_phases_and_the_connection_is_opened_by_the_sender() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a", "b") as replicas:
        assert await publish_weights(coordinator, 1) == 2
        assert [replica.engine.phases for replica in replicas] == [list(PHASES)] * 2
        assert coordinator.versions() == Versions(1)


async def test_members_have_their_workers_and_nodes() -> None:
    coordinator = Coordinator()
    async with within():
        replica = Replica(coordinator, "a")
        await replica.subscribe(workers=2, node="192.0.2.1")
        await replica.catch_up()
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 5.0, token=TOKEN))
        assert await coordinator.begin_transfer(1, TOKEN) == [Member("a", 2, "192.0.2.1")]
        publishing.cancel()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_replica_that_dies_in_a_phase_is_left_out_of_the_next_transfer(phase: Phase) -> None:
    coordinator = Coordinator()
    async with running(coordinator, "living", "doomed") as (living, doomed):

        async def die(*args: Any) -> None:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(doomed.die()))
            await asyncio.Event().wait()

        method = {
            "init": "init_weight_transfer_engine",
            "start": "start_weight_update",
            "update": "update_weights",
            "finish": "finish_weight_update",
        }[phase]
        setattr(doomed.engine, method, die)
        assert await publish_weights(coordinator, 1) == 1
        assert living.engine.version == 1
        # a replica that has finished needs no second transfer
        again = [] if phase == "finish" else ["abort", *PHASES]
        assert living.engine.phases == [*PHASES[: PHASES.index(phase) + 1], *again]
        assert await publish_weights(coordinator, 2) == 1


@pytest.mark.parametrize("lost_in", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_one_call_has_all_replicas_start_receive_and_finish(lost_in: str) -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a", "b") as (first, second):
        original = getattr(first.engine, lost_in)

        async def lose(*args: Any) -> None:
            setattr(first.engine, lost_in, original)
            raise ConnectionError("closed by peer")

        setattr(first.engine, lost_in, lose)
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        await coordinator.begin_transfer(1, TOKEN)
        with pytest.raises(TransferBrokenError, match="a: closed by peer"):
            await coordinator.run_phase("send", {}, 60.0)
        while await coordinator.begin_transfer(1, TOKEN):
            await coordinator.run_phase("send", {}, 60.0)
        assert len(await publishing) == 2
        assert [first.engine.version, second.engine.version] == [1, 1]


async def test_a_replica_that_has_finished_need_not_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_TIMEOUT_S", 0.02)
    coordinator = Coordinator()
    async with running(coordinator, "living", "doomed") as (_, doomed):
        finishing = asyncio.Event()

        async def hang(version: int) -> None:
            finishing.set()
            await asyncio.Event().wait()

        doomed.engine.finish_weight_update = hang
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        sending = asyncio.create_task(send(coordinator, 1, TOKEN))
        await finishing.wait()
        await doomed.die()
        assert len(await publishing) == 1
        await sending
        assert not coordinator.snapshot().evicted


async def test_a_lost_connection_is_no_fault_of_the_replica_that_reports_it() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a", "b") as (first, second):
        first.engine.fails["weights"] = ConnectionError("closed by peer")
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        await until(lambda: "abort" in second.engine.phases)
        first.engine.fails.clear()
        assert await publishing == 2
        assert not coordinator.snapshot().evicted


async def test_a_replica_that_fails_by_itself_is_evicted_when_others_have_the_version() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a", "b") as (first, _):
        first.engine.fails["weights"] = WeightSyncError("no memory")
        assert await publish_weights(coordinator, 1) == 1
        assert coordinator.snapshot().evicted == {"a": "no memory"}


async def test_when_all_fail_the_version_may_be_published_again() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a") as (replica,):
        replica.engine.fails["weights"] = WeightSyncError("no memory")
        with pytest.raises(WeightSyncError, match="a: no memory"):
            await publish_weights(coordinator, 1)
        assert coordinator.versions() == Versions()
        replica.engine.fails.clear()
        assert await publish_weights(coordinator, 1) == 1
        with pytest.raises(WeightSyncError, match="never reused"):
            await publish_weights(coordinator, 1)


async def test_a_sender_that_fails_ends_the_publication_and_its_transfer() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a") as (replica,):
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        assert await coordinator.begin_transfer(1, TOKEN)
        await coordinator.run_phase("init", {}, 60.0)
        await coordinator.run_phase("start", {}, 60.0)
        await coordinator.fail_publication(TOKEN, "learner 0 died")
        with pytest.raises(WeightSyncError, match="version 1 was not sent: learner 0 died"):
            await publishing
        await until(lambda: "abort" in replica.engine.phases)
        with pytest.raises(TransferBrokenError):
            await coordinator.run_phase("update", {}, 60.0)
        assert await coordinator.begin_transfer(1, TOKEN) is None
        assert await publish_weights(coordinator, 1) == 1


async def test_a_replica_that_does_not_abort_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_TIMEOUT_S", 0.02)
    coordinator = Coordinator()
    async with running(coordinator, "stuck", "other") as (stuck, other):
        stuck.engine.gate.clear()
        other.engine.fails["weights"] = ConnectionError("timed out")
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        await until(lambda: "abort" in other.engine.phases)
        other.engine.fails.clear()
        assert await publishing == 1
        assert "did not abort a broken weight transfer" in coordinator.snapshot().evicted["stuck"]


async def test_an_update_that_a_restarted_coordinator_does_not_know_is_aborted() -> None:
    old = Coordinator()
    async with within():
        replica = await join(old, "a")
        publishing = asyncio.create_task(old.client.publish(1, None, 60.0, token=TOKEN))
        assert await old.begin_transfer(1, TOKEN)
        starting = asyncio.create_task(old.run_phase("start", {}, 60.0))
        await replica.do()
        await starting
        replica.coordinator = coordinator = Coordinator(restored=False)
        await coordinator.restore(old.snapshot())
        await replica.subscribe()
        again = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        beginning = asyncio.create_task(coordinator.begin_transfer(1, TOKEN))
        await turns()
        assert not beginning.done()
        assert (await replica.do()).kind == "abort"
        assert await beginning == [Member("a", 1, "")]
        publishing.cancel()
        again.cancel()


async def test_a_replica_that_joins_counts_when_it_has_the_weights() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a"):
        await publish_weights(coordinator, 1)
        late = RunningReplica(coordinator, "late")
        catching_up = asyncio.create_task(late.start())
        await until(lambda: coordinator.snapshot().lacking == {"late"})
        assert await coordinator.begin_transfer(2) is None  # not the current version
        await send(coordinator, 1)
        await catching_up
        assert late.engine.version == 1
        assert not coordinator.snapshot().lacking
        assert await coordinator.begin_transfer(1) is None
        await late.executor.close()


async def test_a_publication_includes_replicas_that_joined() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a"):
        await publish_weights(coordinator, 1)
        late = RunningReplica(coordinator, "late")
        catching_up = asyncio.create_task(late.start())
        await until(lambda: bool(coordinator.snapshot().lacking))
        assert await publish_weights(coordinator, 2) == 2
        await catching_up
        assert late.engine.told == [("weights", 2, "keep")]
        await late.executor.close()


async def publish_and_begin(coordinator: Coordinator, phase: Phase, **settings: Any) -> tuple[Any, Any]:
    """Publish version 1, and begin a phase of its transfer; return both tasks."""
    timeout = settings.pop("timeout", 60.0)
    publishing = asyncio.create_task(coordinator.client.publish(1, None, timeout, token=TOKEN, **settings))
    assert await coordinator.begin_transfer(1, TOKEN)
    beginning = asyncio.create_task(coordinator.run_phase(phase, {}, 60.0))
    await turns()
    return publishing, beginning


@pytest.mark.parametrize("finishes", [True, False])
async def test_a_version_that_is_received_after_its_time_is_used(
    finishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quorum, "LAST_EVICTION_SHARE", 0.0)  # as if the phase began at the very end
    monkeypatch.setattr(quorum, "LATE_SHARE", 2.0)  # nor is it silent
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a")
        publishing, phase = await publish_and_begin(coordinator, "finish", timeout=0.2)
        task = await replica.next()
        with pytest.raises(WeightSyncError, match="did not reach"):
            await publishing
        with pytest.raises(TransferBrokenError):
            await phase
        again = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token="other weights"))
        await turns()
        assert coordinator.snapshot().desired == {}, "a member may still finish the first transfer"
        await replica.finish(task, None if finishes else "closed by peer")
        if finishes:
            with pytest.raises(WeightSyncError, match="never reused"):
                await again
            assert coordinator.snapshot().version == 1
        else:
            assert await coordinator.begin_transfer(1, "other weights")
            again.cancel()


async def test_a_version_is_used_that_a_replica_received_which_was_taken_for_dead() -> None:
    coordinator, life = Coordinator(), Life()
    async with within():
        replica = await join(coordinator, "a", life)
        publishing, phase = await publish_and_begin(coordinator, "finish", timeout=0.05)
        task = await replica.next()
        life.end()
        with pytest.raises(WeightSyncError, match="a replacement for a dead replica"):
            await publishing
        with pytest.raises(TransferBrokenError):
            await phase
        replica.state, replica.life = changed(replica.state, task), Life()
        await replica.subscribe()
        restarted = Coordinator(restored=False)
        await restarted.restore(coordinator.snapshot())
        for current in (coordinator, restarted):
            with pytest.raises(WeightSyncError, match="version 1 is not newer than 1; versions are never"):
                await current.client.publish(1, None, 60.0, token="other weights")


@pytest.mark.parametrize("probe", [[], [1, 2]])
async def test_members_that_have_all_weights_finish_without_the_sender(probe: list[int]) -> None:
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a")
        publishing, phase = await publish_and_begin(coordinator, "finish", probe=probe)
        task = await replica.next()
        await coordinator.fail_publication(TOKEN, "learner 0 died")
        with pytest.raises(TransferBrokenError):
            await phase
        assert not publishing.done()
        await replica.finish(task)
        if probe:
            assert (await replica.do(result=[-2.0])).kind == "probe"
        assert await publishing == {"a": [-2.0] if probe else None}
        assert not coordinator.snapshot().evicted


async def test_a_member_that_was_just_handed_a_phase_aborts_it_first() -> None:
    coordinator = Coordinator()
    async with within():
        a, b = await join(coordinator, "a"), await join(coordinator, "b")
        publishing, phase = await publish_and_begin(coordinator, "start")
        task = await a.next()
        failing = await b.next()
        b.answer = TaskAnswer(failing.number, "closed by peer", lost=True)
        await b.poll(waits=False)
        with pytest.raises(TransferBrokenError, match="b: closed by peer"):
            await phase
        assert not a.state.updating
        beginning = asyncio.create_task(coordinator.begin_transfer(1, TOKEN))
        await turns()
        assert not beginning.done(), "a member executes the phase"
        await a.finish(task)
        assert (await a.do()).kind == "abort"
        assert [member.replica for member in await beginning or []] == ["a", "b"]
        publishing.cancel()


async def test_a_member_that_did_not_receive_its_phase_need_not_abort() -> None:
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a")
        publishing, phase = await publish_and_begin(coordinator, "init")
        assert (await replica.next()).kind == "init"  # the response is lost
        polling = asyncio.create_task(replica.poll())
        await coordinator.fail_publication(TOKEN, "learner 0 died")
        with pytest.raises(TransferBrokenError):
            await phase
        with pytest.raises(WeightSyncError, match="was not sent: learner 0 died"):
            await publishing
        polling.cancel()
        assert not coordinator.snapshot().evicted


@pytest.mark.parametrize("returns", [True, False])
async def test_a_received_version_is_never_issued_again_after_a_restart(returns: bool) -> None:
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a")
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        assert await coordinator.begin_transfer(1, TOKEN)
        finishing = asyncio.create_task(coordinator.run_phase("finish", {}, 60.0))
        assert (await replica.do()).kind == "finish"
        await finishing
        state = coordinator.snapshot()
        publishing.cancel()
        replica.coordinator = restarted = Coordinator(restored=False)
        await restarted.restore(Snapshot(version=-1) if returns else state)
        if returns:  # the caller's repetition ends well at once
            await replica.subscribe()
            assert len(await restarted.client.publish(1, None, 5.0, token="again")) == 1
        else:
            with pytest.raises(WeightSyncError):
                await restarted.client.publish(1, None, 0.01, token="again")
        with pytest.raises(WeightSyncError, match="never reused"):
            await restarted.client.publish(1, None, 0.01, token="third")


async def test_a_sender_notices_after_a_restart_that_its_publication_has_ended() -> None:
    """It would wait for ever for replicas that lack the version."""
    coordinator = Coordinator()
    async with running(coordinator, "a"):
        await publish_weights(coordinator, 1)
        restarted = Coordinator(restored=False)
        await restarted.restore(coordinator.snapshot())
        assert await restarted.begin_transfer(1, coordinator.snapshot().ended_tokens[-1]) is None


async def test_too_few_replicas_wait_for_replacements_and_then_fail() -> None:
    coordinator = Coordinator(replacement_timeout_s=0.2, min_replicas=2)
    async with running(coordinator, "a", "doomed") as (_, doomed):
        await publish_weights(coordinator, 1)
        await doomed.die()
        with pytest.raises(WeightSyncError, match=r"reached 1 replicas .* engine.min_replicas is 2"):
            await publish_weights(coordinator, 2, timeout=0.05)
        replacement = RunningReplica(coordinator, "replacement")
        starting = asyncio.create_task(replacement.start())
        assert await publish_weights(coordinator, 2) == 2
        assert (await starting, replacement.engine.version) == (None, 2)
        with pytest.raises(WeightSyncError, match="never reused"):
            await publish_weights(coordinator, 2)
        await replacement.executor.close()


async def test_a_version_is_published_again_whose_only_receiver_died_meanwhile() -> None:
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a", life := Life())
        publishing, phase = await publish_and_begin(coordinator, "finish", probe=[1, 2])
        await replica.do()
        await phase
        life.end()
        await coordinator.fail_publication(TOKEN, "learner 0 died")
        with pytest.raises(WeightSyncError, match="was not sent: learner 0 died"):
            await publishing
        other = RunningReplica(coordinator, "b")
        starting = asyncio.create_task(other.start())
        assert await publish_weights(coordinator, 1) == 1
        await starting
        await other.executor.close()


async def test_a_publication_whose_sender_fails_before_its_turn_ends_at_once() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a") as (replica,):
        replica.engine.gate.clear()
        probing = asyncio.create_task(coordinator.client.probe([1, 2], 60.0))
        await turns()
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        sending = asyncio.create_task(coordinator.begin_transfer(1, TOKEN))
        await turns()
        await coordinator.fail_publication(TOKEN, "learner 0 died")
        with pytest.raises(WeightSyncError, match="version 1 was not sent: learner 0 died"):
            await publishing
        assert await sending is None
        replica.engine.gate.set()
        await probing
        await coordinator.fail_publication("not issued yet", "learner 0 died")
        with pytest.raises(WeightSyncError, match="version 1 was not sent: learner 0 died"):
            await coordinator.client.publish(1, None, 60.0, token="not issued yet")
        assert await publish_weights(coordinator, 1) == 1
        assert not coordinator._failed_senders


async def test_a_sender_notices_that_its_publication_was_refused() -> None:
    coordinator = Coordinator()
    async with running(coordinator, "a"):
        await coordinator.client.sleep(60.0)
        sending = asyncio.create_task(coordinator.begin_transfer(1, TOKEN))
        with pytest.raises(WeightSyncError, match="asleep"):
            await coordinator.client.publish(1, None, 60.0, token=TOKEN)
        assert await sending is None


async def test_too_few_replicas_for_an_adapter_fail_too() -> None:
    coordinator = Coordinator(min_replicas=2)
    async with within():
        replica = await join(coordinator, "a")
        publishing = asyncio.create_task(coordinator.client.publish(1, ["payload"], 0.05, adapter="policy"))
        await replica.do()
        with pytest.raises(WeightSyncError, match=r"reached 1 replicas .* engine.min_replicas is 2"):
            await publishing


async def test_a_replacement_completes_the_number_of_replicas() -> None:
    coordinator = Coordinator(replacement_timeout_s=30.0, min_replicas=2)
    async with running(coordinator, "a", "doomed") as (_, doomed):
        await doomed.die()
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        await turns()
        replacement = RunningReplica(coordinator, "replacement")
        await replacement.start()
        assert await publishing == 2
        await replacement.executor.close()


async def test_a_replica_without_a_transfer_waits_and_a_withdrawn_version_needs_none() -> None:
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a")
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 0.05, token=TOKEN))
        await turns()
        assert await replica.idle()
        with pytest.raises(WeightSyncError, match="did not reach"):
            await publishing
        assert coordinator.snapshot().desired == {}
        await join(coordinator, "b")


async def test_a_member_gets_its_own_argument_of_a_phase() -> None:
    coordinator = Coordinator()
    async with within():
        replica = await join(coordinator, "a")
        publishing = asyncio.create_task(coordinator.client.publish(1, None, 60.0, token=TOKEN))
        assert await coordinator.begin_transfer(1, TOKEN)
        phase = asyncio.create_task(coordinator.run_phase("init", {"a": b"address"}, 60.0))
        task = await replica.next()
        assert task == Task(task.number, "init", coordinator._desired["weights"], b"address")
        await coordinator.poll("a", ReplicaReport(replica.state, TaskAnswer(task.number), waits=False))
        await phase
        publishing.cancel()
