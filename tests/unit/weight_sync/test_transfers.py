"""Transfers: their members execute phases together, and one that is lost in any phase is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from coordinator_helpers import (
    Replica,
    coordinator_with,
    join,
    obey,
    publish_weights,
    replicas_of,
    send,
    turns,
)
from unit_helpers import until, within

from raylight.errors import TransferBrokenError, WeightSyncError
from raylight.weight_sync import transfer_sequence
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import Snapshot, Versions
from raylight.weight_sync.transfers import Member, PhaseKind

PHASES: tuple[PhaseKind, ...] = ("init", "start", "update", "finish")
TOKEN = "a publication"


async def test_all_replicas_execute_the_phases_and_the_connection_is_opened_by_the_sender() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        replicas = await replicas_of(coordinator, "a", "b")
        assert await publish_weights(coordinator, 1) == 2
        assert [replica.engine.phases for replica in replicas] == [list(PHASES)] * 2
        assert await coordinator.versions() == Versions(1)


async def test_members_have_their_workers_and_nodes() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        await coordinator.subscribe("a", workers=2, node="192.0.2.1")
        await coordinator.acknowledge("a", 0)
        publishing = asyncio.create_task(coordinator.publish(1, None, 5.0, token=TOKEN))
        assert await coordinator.begin_transfer(1, TOKEN) == [Member("a", 2, "192.0.2.1")]
        publishing.cancel()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_replica_that_dies_in_a_phase_is_left_out_of_the_next_transfer(phase: PhaseKind) -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        living, doomed = await replicas_of(coordinator, "living", "doomed")

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
    coordinator = ReplicaCoordinator()
    async with within():
        first, second = await replicas_of(coordinator, "a", "b")
        original = getattr(first.engine, lost_in)

        async def lose(*args: Any) -> None:
            setattr(first.engine, lost_in, original)
            raise ConnectionError("closed by peer")

        setattr(first.engine, lost_in, lose)
        publishing = asyncio.create_task(coordinator.publish(1, None, 60.0, token=TOKEN))
        await coordinator.begin_transfer(1, TOKEN)
        with pytest.raises(TransferBrokenError, match="a: closed by peer"):
            await coordinator.run_phase("send", {}, 60.0)
        assert await coordinator.begin_transfer(1, TOKEN)
        await coordinator.run_phase("send", {}, 60.0)
        assert len(await publishing) == 2
        assert await coordinator.begin_transfer(1, TOKEN) is None
        assert [first.engine.version, second.engine.version] == [1, 1]


async def test_a_replica_that_has_finished_need_not_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_sequence, "ABORT_TIMEOUT_S", 0.02)
    coordinator = ReplicaCoordinator()
    async with within():
        _, doomed = await replicas_of(coordinator, "living", "doomed")
        finishing = asyncio.Event()

        async def hang(version: int) -> None:
            finishing.set()
            await asyncio.Event().wait()

        doomed.engine.finish_weight_update = hang  # type: ignore[method-assign]
        publishing = asyncio.create_task(coordinator.publish(1, None, 60.0, token=TOKEN))
        sending = asyncio.create_task(send(coordinator, 1, TOKEN))
        await finishing.wait()
        await doomed.die()
        assert len(await publishing) == 1
        await sending
        assert not coordinator.snapshot().evicted


async def test_a_lost_connection_is_no_fault_of_the_replica_that_reports_it() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        first, second = await replicas_of(coordinator, "a", "b")
        first.engine.fails["weights"] = ConnectionError("closed by peer")
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        await until(lambda: "abort" in second.engine.phases)
        first.engine.fails.clear()
        assert await publishing == 2
        assert not coordinator.snapshot().evicted


async def test_a_replica_that_fails_by_itself_is_evicted_when_others_have_the_version() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        first, _ = await replicas_of(coordinator, "a", "b")
        first.engine.fails["weights"] = WeightSyncError("no memory")
        assert await publish_weights(coordinator, 1) == 1
        assert coordinator.snapshot().evicted == {"a": "no memory"}


async def test_when_all_fail_the_version_may_be_published_again() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        (replica,) = await replicas_of(coordinator, "a")
        replica.engine.fails["weights"] = WeightSyncError("no memory")
        with pytest.raises(WeightSyncError, match="a: no memory"):
            await publish_weights(coordinator, 1)
        assert await coordinator.versions() == Versions()
        replica.engine.fails.clear()
        assert await publish_weights(coordinator, 1) == 1
        with pytest.raises(WeightSyncError, match="never reused"):
            await publish_weights(coordinator, 1)


async def test_a_sender_that_fails_ends_the_publication_and_its_transfer() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        (replica,) = await replicas_of(coordinator, "a")
        publishing = asyncio.create_task(coordinator.publish(1, None, 60.0, token=TOKEN))
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
    monkeypatch.setattr(transfer_sequence, "ABORT_TIMEOUT_S", 0.02)
    coordinator = ReplicaCoordinator()
    async with within():
        stuck, other = await replicas_of(coordinator, "stuck", "other")
        stuck.engine.gate.clear()
        other.engine.fails["weights"] = ConnectionError("timed out")
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        await until(lambda: "abort" in other.engine.phases)
        other.engine.fails.clear()
        assert await publishing == 1
        assert "did not abort a broken weight transfer" in coordinator.snapshot().evicted["stuck"]


async def test_a_replica_that_joins_counts_when_it_has_the_weights() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        await replicas_of(coordinator, "a")
        await publish_weights(coordinator, 1)
        state = await coordinator.subscribe("late")
        assert [order.version for order in state.orders] == [1]
        assert coordinator.snapshot().lacking == {"late"}
        assert await coordinator.begin_transfer(2) is None  # not the current version
        late = Replica(coordinator, "late")
        executing = asyncio.create_task(late._execute(state.orders[0]))
        await send(coordinator, 1)
        await executing
        assert late.engine.version == 1
        assert not coordinator.snapshot().lacking
        assert await coordinator.begin_transfer(1) is None


async def test_a_publication_includes_replicas_that_joined() -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        await replicas_of(coordinator, "a")
        await publish_weights(coordinator, 1)
        state = await coordinator.subscribe("late")
        late = Replica(coordinator, "late")
        executing = asyncio.create_task(late._execute(state.orders[0]))
        await turns()
        publishing = asyncio.create_task(publish_weights(coordinator, 2))
        await executing
        for order in await coordinator.next("late", state.number, 60.0):
            await coordinator.acknowledge("late", order.number)
        assert await publishing == 2
        assert late.engine.told == [("weights", 2, "keep")]


@pytest.mark.parametrize("returns", [True, False])
async def test_a_received_version_is_never_issued_again_after_a_restart(returns: bool) -> None:
    coordinator = ReplicaCoordinator()
    async with within():
        await join(coordinator, "a")
        publishing = asyncio.create_task(coordinator.publish(1, None, 60.0, token=TOKEN))
        assert await coordinator.begin_transfer(1, TOKEN)
        finishing = asyncio.create_task(coordinator.run_phase("finish", {}, 60.0))
        phase = await coordinator.next_phase("a", 0, 1, 60.0)
        assert phase is not None
        await coordinator.acknowledge_phase("a", phase.number)
        await finishing
        state = coordinator.snapshot()
        publishing.cancel()
    restarted = ReplicaCoordinator(restored=False)
    async with within():
        await restarted.restore(Snapshot(version=state.version) if returns else state)
        if returns:
            await restarted.subscribe("a", returns=True, held=1)
        with pytest.raises(WeightSyncError):
            await restarted.publish(1, None, 0.01, token="again")
        with pytest.raises(WeightSyncError, match="never reused"):
            await restarted.publish(1, None, 0.01, token="third")


async def test_a_sender_learns_after_a_restart_that_its_publication_has_ended() -> None:
    """Otherwise it waits for replicas that lack the version, and there will be none."""
    coordinator = ReplicaCoordinator()
    async with within():
        await replicas_of(coordinator, "a")
        await publish_weights(coordinator, 1)
    restarted = ReplicaCoordinator(restored=False)
    async with within():
        await restarted.restore(coordinator.snapshot())
        assert await restarted.begin_transfer(1, "publication of 1") is None


async def test_too_few_replicas_wait_for_replacements_and_then_fail() -> None:
    coordinator = ReplicaCoordinator(replacement_timeout_s=0.2, min_replicas=2)
    async with within():
        _, doomed = await replicas_of(coordinator, "a", "doomed")
        await publish_weights(coordinator, 1)
        await doomed.die()
        with pytest.raises(WeightSyncError, match=r"reached 1 replicas .* engine.min_replicas is 2"):
            await publish_weights(coordinator, 2, timeout=0.05)


async def test_too_few_replicas_for_an_adapter_fail_too() -> None:
    coordinator = ReplicaCoordinator(min_replicas=2)
    async with within():
        await join(coordinator, "a")
        publishing = asyncio.create_task(coordinator.publish(1, ["payload"], 0.05, adapter="policy"))
        await obey(coordinator, "a")
        with pytest.raises(WeightSyncError, match=r"reached 1 replicas .* engine.min_replicas is 2"):
            await publishing


async def test_a_replacement_completes_the_number_of_replicas() -> None:
    coordinator = ReplicaCoordinator(replacement_timeout_s=30.0, min_replicas=2)
    async with within():
        _, doomed = await replicas_of(coordinator, "a", "doomed")
        await doomed.die()
        publishing = asyncio.create_task(publish_weights(coordinator, 1))
        await turns()
        state = await coordinator.subscribe("replacement")
        replacement = Replica(coordinator, "replacement")
        await replacement._execute(state.orders[0])
        assert await publishing == 2


async def test_a_replica_without_a_transfer_waits() -> None:
    coordinator = await coordinator_with("a")
    async with within():
        publishing = asyncio.create_task(coordinator.publish(1, None, 60.0, token=TOKEN))
        await turns()
        assert await coordinator.next_phase("a", 0, 1, 0.01) is None
        publishing.cancel()
        await asyncio.wait([publishing])
        withdrawn = await coordinator.next_phase("a", 0, 1, 60.0)
        assert withdrawn is not None
        assert withdrawn.kind == "withdrawn"
        await join(coordinator, "b")
