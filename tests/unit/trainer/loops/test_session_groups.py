"""Training on sessions of agents outside the run, some of which fail, leave, or answer late, while the driver
is killed."""

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from training_world import TASKS, FakeRun, World, live, mixed, recorded_steps

import raylight as rl
from raylight._utils.aio import pause, task_group
from raylight.config import SessionConfig
from raylight.errors import StoreError
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.client import Session
from raylight.trainer.loops.session_groups import DROP_REASONS, closing_delay
from raylight.types import Attempt, CallKey, Failure, Generation, RolloutState, RolloutStatus, Span

LEASE_S = 0.05
FATES = {"rewarded": 12, "late": 3, "never": 1, "failed": 2, "cancelled": 1, "empty": 1}
ONLINE = {
    "max_staleness": 2,
    "stale": "drop",
    "val_every": None,
    "rollout": {"unresponsive_seconds": LEASE_S, "infrastructure_retries": 0},
}


class Outside:
    """Agents that outlive the driver."""

    def __init__(self, seed: int, fates: dict[str, int] = FATES, group_size: int = 1) -> None:
        self.random, self.group_size = random.Random(seed), group_size
        each = [fate for fate, weight in fates.items() for _ in range(weight)]
        self.random.shuffle(each)
        self.fates = itertools.cycle(each)
        self.numbers = itertools.count()
        self.left: list[tuple[Session, str]] = []
        """Open sessions of a driver that was killed, and what becomes of them."""
        self.sent: set[str] = set()
        """Rollouts whose reward was sent to the store, which may not have acknowledged it."""
        self.begun: Counter[str] = Counter()
        self.unanswered = 0
        """Number of sessions that the store may have begun without an answer to the agent."""
        self.fate_of: dict[str, str] = {}
        self.opened = group_size
        """Number of sessions that an agent opens of each second group before it leaves."""


class SessionRun(FakeRun):
    """Agents outside this run open sessions."""

    async def _run_agents(self) -> None:
        outside = self.world.outside  # type: ignore[attr-defined]
        async with task_group() as agents:
            for session, fate in outside.left[:]:
                agents.create_task(self._end(session, fate))
            while True:
                group, member = divmod(next(outside.numbers), outside.group_size)
                if group % 2 and member >= outside.opened:
                    continue
                name = f"g{group}" if outside.group_size > 1 else None
                session = await self._begin(group, name)
                outside.begun[session.state.rollout_id] += 1
                fate = outside.fate_of[session.state.rollout_id] = next(outside.fates)
                agents.create_task(self._run_session(session, fate))

    async def _begin(self, group: int, name: str | None) -> Session:
        outside = self.world.outside  # type: ignore[attr-defined]
        while True:
            try:
                session = await self.store.begin_session(group, name)
            except (asyncio.CancelledError, StoreError):
                outside.unanswered += 1
                raise
            if session is not None:
                return session
            await pause(0.002)

    async def _run_session(self, session: Session, fate: str) -> None:
        outside = self.world.outside  # type: ignore[attr-defined]
        outside.left.append((session, fate))
        if fate == "slow":
            await self._call_slowly(session)
        elif fate == "long":
            await self._call_over_versions(session, 2 * self.world.staleness)
        elif fate != "empty":
            for turn in range(outside.random.randrange(1, 3)):
                await self._call(session.state, turn, turn + 7, "policy")
                await pause(outside.random.random() * 0.01)
        await self._end(session, fate)

    async def _call_over_versions(self, session: Session, versions: int) -> None:
        """Make a call with each of so many versions of the weights after the first one."""
        first = self.engines.version
        for turn in range(versions + 1):
            while self.engines.version < first + turn:
                await pause(0.002)
            await self._call(session.state, turn, turn + 7, "policy")

    async def _call_slowly(self, session: Session) -> None:
        """Make a call that takes longer than the lease."""
        key = CallKey(session.state.rollout_id, session.session_id, "slow")
        version, _ = self.engines.serve("policy")
        await self.store.capture([(key, 0.0)], [])
        while (await self._attempt(session)).status == "running":
            await pause(LEASE_S)
        call = Generation(key, "policy", [1, 2], [7], [-1.0], [version], "stop", 0.0, 1.0)
        await self.store.capture([], [(key, call, None)])

    async def _end(self, session: Session, fate: str) -> None:
        outside = self.world.outside  # type: ignore[attr-defined]
        if self.die_after is not None and len(outside.sent) >= self.die_after:
            await self.service.close()
            raise StoreError("killed")
        if fate == "never":
            return
        if fate == "late":
            while (await self._attempt(session)).status == "running":
                await pause(LEASE_S)
        failure = None
        if fate in ("failed", "cancelled"):
            failure = Failure(kind="agent" if fate == "failed" else "cancelled", error=fate)
        worth = int(mixed(session.session_id), 16) % 997 / 997
        if failure is None:
            outside.sent.add(session.state.rollout_id)
            self.world.sampled[session.state.rollout_id] += 1
        spans = [] if failure else [_reward_span(session, worth)]
        await self.store.finish_attempt(session.state, "failed" if failure else "succeeded", failure, spans)
        outside.left.remove((session, fate))

    async def _attempt(self, session: Session) -> Any:
        return (await self.store.get_session(session.session_id)).state.attempt


def _reward_span(session: Session, value: float) -> Span:
    ids = {"rollout_id": session.state.rollout_id, "attempt_id": session.session_id}
    return Span.from_attributes(
        name=ANNOTATION, attributes=dict(reward_attributes({"primary": value})), start_time=1.0, **ids
    )


def world_of(folder: Path, outside: Outside) -> World:
    folder.mkdir()
    world = World(folder)
    world.run, world.algorithm, world.staleness = SessionRun, rl.algorithms.ReinforcePlusPlus, 2
    world.sessions, world.val_tasks = SessionConfig(max_open=32), 0
    world.outside = outside  # type: ignore[attr-defined]
    return world


def taken_by(world: World) -> tuple[list[int], list[int]]:
    """Return the groups that were trained, and those that were dropped."""
    steps = asyncio.run(recorded_steps(world))
    assert sorted(steps) == list(range(1, world.steps + 1))
    assert {len(step.trained) for step in steps.values()} == {TASKS}
    trained = [group for step in steps.values() for group in step.trained]
    dropped = [group for step in steps.values() for group in step.dropped]
    assert max(Counter(trained + dropped).values()) == 1
    return trained, dropped


def check(world: World, rows: list[dict], outside: Outside, is_exact: bool = True) -> None:
    """Assert that every step was taken once, on sessions that were rewarded and made calls.

    Args:
        is_exact: every session of a group that a step took is trained.
    """
    assert [row["step"] for row in rows] == list(range(1, world.steps + 1))
    trained, dropped = taken_by(world)
    lineage = next(iter(world.sampled)).partition("-")[0]
    known = {name for _, names in world.trained for name in names}
    size = outside.group_size
    members = {f"{lineage}-train-{group}-{member}" for group in trained for member in range(size)}
    assert known <= members & outside.sent
    assert not is_exact or known == members, "a group without a reward is replaced"
    assert not set(trained) & set(dropped)
    last = rows[-1]
    assert last["ledger/trained"] > 0
    assert 0 <= last["sessions/begun"] - outside.begun.total() <= outside.unanswered
    assert max(outside.begun.values()) == 1, "a place is taken once"


@pytest.mark.parametrize(
    ("seed", "stale"),
    [
        *[(0, "drop"), (1, "mask")],
        *(pytest.param(*given, marks=pytest.mark.slow) for given in [(1, "drop"), (0, "mask")]),
    ],
)
def test_steps_take_rewarded_sessions(seed: int, stale: str, tmp_path: Path) -> None:
    outside = Outside(seed)
    world = world_of(tmp_path / "a", outside)
    rows = asyncio.run(live(world, group_size=1, **ONLINE | {"stale": stale}))
    check(world, rows, outside, is_exact=stale == "drop")
    dropped = {reason: rows[-1][f"sessions/dropped_{reason}"] for reason in DROP_REASONS}
    assert dropped["failed"]
    assert dropped["cancelled"]
    assert dropped["empty"]
    assert sum(dropped.values()) >= len(taken_by(world)[1])


@pytest.mark.parametrize(
    ("stale", "least", "most"),
    [
        pytest.param("drop", 0.0, 0.0, marks=pytest.mark.slow("sessions that are masked show it")),
        ("mask", 0.08, 0.35),
    ],
)
def test_long_sessions_are_trained(stale: str, least: float, most: float, tmp_path: Path) -> None:
    """A fifth of the sessions lasts for four updates, twice as many as tokens may be old."""
    outside = Outside(4, {"rewarded": 4, "long": 1})
    world = world_of(tmp_path / "a", outside)
    world.steps = 24
    patient = ONLINE["rollout"] | {"unresponsive_seconds": 1.0}  # an update may be slow
    asyncio.run(live(world, group_size=1, **ONLINE | {"stale": stale, "rollout": patient}))
    lineage = next(iter(world.sampled)).partition("-")[0]
    trained, _ = taken_by(world)
    long = [outside.fate_of[f"{lineage}-train-{group}-0"] == "long" for group in trained]
    assert least <= sum(long) / len(long) <= most


def test_late_rewards_are_used_while_their_tokens_are_young(tmp_path: Path) -> None:
    outside = Outside(2, {"rewarded": 1, "late": 1})
    world = world_of(tmp_path / "a", outside)
    world.staleness = 8
    rows = asyncio.run(live(world, group_size=1, **ONLINE | {"max_staleness": 8}))
    check(world, rows, outside)
    assert rows[-1]["sessions/late_used"] > 0


class EndedCallRun(SessionRun):
    """A call of an expired session ends after its rollout was read, and before the store is asked for it."""

    async def _open(self) -> None:
        await super()._open()
        is_open = self.store.has_open_call

        async def ended(attempt_id: str) -> bool:
            while await is_open(attempt_id):
                await pause(0.002)
            return False

        self.store.has_open_call = ended  # type: ignore[method-assign]


@pytest.mark.parametrize("run", [SessionRun, EndedCallRun])
def test_a_first_call_that_takes_longer_than_the_lease_is_trained(
    run: type[SessionRun], tmp_path: Path
) -> None:
    outside = Outside(8, {"rewarded": 1, "slow": 1})
    world = world_of(tmp_path / "a", outside)
    world.run, world.staleness = run, 8
    patient = ONLINE["rollout"] | {"unresponsive_seconds": 1.0}
    rows = asyncio.run(live(world, group_size=1, **ONLINE | {"max_staleness": 8, "rollout": patient}))
    check(world, rows, outside)
    lineage = next(iter(world.sampled)).partition("-")[0]
    _, dropped = taken_by(world)
    fates = [outside.fate_of[f"{lineage}-train-{group}-0"] for group in dropped]
    assert "slow" not in fates, "others may begin their calls too late on a busy machine"
    assert rows[-1]["sessions/late_used"] > 0


class SlowWaitRun(SessionRun):
    """The end of a wait for late rewards takes longer than the beginning of the next one."""

    async def _open(self) -> None:
        await super()._open()
        wait = self.store.wait_until_final

        async def wait_slowly(rollout_ids: Any) -> None:
            try:
                await wait(rollout_ids)
            except asyncio.CancelledError:
                await pause(0.05)
                raise

        self.store.wait_until_final = wait_slowly  # type: ignore[method-assign]


def test_an_outage_while_rewards_are_late(tmp_path: Path) -> None:
    """The run waits again for all groups, even for groups whose sessions have expired."""
    outside = Outside(11, {"rewarded": 4, "never": 1})
    world = world_of(tmp_path / "a", outside)
    world.run, world.staleness, world.outages_at = SlowWaitRun, 8, {3, 5, 7}
    rows = asyncio.run(live(world, group_size=1, **ONLINE | {"max_staleness": 8}))
    assert rows[-1]["step"] == world.steps
    taken_by(world)


def test_late_rewards_are_counted_when_their_tokens_are_old(tmp_path: Path) -> None:
    outside = Outside(3, {"rewarded": 9, "never": 1})
    world = world_of(tmp_path / "a", outside)
    rows = asyncio.run(live(world, group_size=1, **ONLINE))
    check(world, rows, outside)
    assert rows[-1]["sessions/dropped_abandoned"] > 0
    assert rows[-1]["ledger/failed"] + rows[-1]["ledger/dropped"] > 0


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_driver_goes_on_with_the_sessions_that_were_open(seed: int, tmp_path: Path) -> None:
    outside = Outside(seed, {"rewarded": 7, "late": 2, "failed": 1})
    world = world_of(tmp_path / "a", outside)
    for killed_after in (7, 18):
        asyncio.run(live(world, die_after=killed_after, group_size=1, **ONLINE))
        assert outside.left, "sessions are open"
    rows = asyncio.run(live(world, group_size=1, **ONLINE))
    check(world, rows, outside)


def test_named_groups(tmp_path: Path) -> None:
    outside = Outside(6, {"rewarded": 4, "failed": 1}, group_size=2)
    world = world_of(tmp_path / "a", outside)
    world.algorithm = rl.GRPO
    rows = asyncio.run(live(world, group_size=2, **ONLINE))
    check(world, rows, outside)
    assert rows[-1]["sessions/dropped_incomplete"] > 0


def test_a_group_that_its_agent_leaves_is_replaced(tmp_path: Path) -> None:
    """Its free places would fill the room of the run."""
    outside = Outside(9, {"rewarded": 1}, group_size=2)
    outside.opened = 1
    world = world_of(tmp_path / "a", outside)
    world.algorithm = rl.GRPO
    rows = asyncio.run(live(world, group_size=2, **ONLINE))
    check(world, rows, outside)
    assert rows[-1]["sessions/dropped_incomplete"] >= ONLINE["max_staleness"] * TASKS


def test_a_group_that_its_agent_leaves_is_trained_with_two_rewards(tmp_path: Path) -> None:
    outside = Outside(10, {"rewarded": 3, "never": 1}, group_size=3)
    outside.opened = 2
    world = world_of(tmp_path / "a", outside)
    world.algorithm = rl.GRPO
    rows = asyncio.run(live(world, group_size=3, **ONLINE))
    check(world, rows, outside, is_exact=False)
    sizes = Counter(name.rpartition("-")[0] for _, names in world.trained for name in names)
    assert {*sizes.values()} == {2, 3}


def state(status: RolloutStatus) -> RolloutState:
    attempt = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1.0)
    begun = None if status == "queuing" else attempt
    return RolloutState(rollout_id="r", status=status, start_time=0.0, attempt=begun)


@pytest.mark.parametrize(
    ("states", "delay"),
    [
        ([state("succeeded"), state("queuing")], 10.0),
        ([state("succeeded"), state("failed"), state("queuing")], 10.0),
        ([state("requeuing"), state("queuing")], 10.0),
        ([state("succeeded"), state("running"), state("queuing")], None),
        ([state("preparing"), state("queuing")], None),
        ([state("queuing"), state("queuing")], None),
        ([state("requeuing")], None),
    ],
)
def test_free_places_are_closed_a_lease_after_the_last_session(
    states: list[RolloutState], delay: float | None
) -> None:
    assert closing_delay(states, lease_s=10.0) == delay
    assert closing_delay(states, lease_s=None) is None
