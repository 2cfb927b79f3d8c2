"""Start of runners without Ray: placement, slow starts, progress, failures."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from raylight.config import RunnerConfig
from raylight.errors import PlacementError, RunnerLostError
from raylight.runner import pool as start_up
from raylight.runner.pool import UNPLACED, StartState, StartUp, read_start_states

pytestmark = pytest.mark.timeout(60)
STARTING = StartState("starting", 0, "ab12")
LOADING = StartState("loading", 4711, "ab12")
SHORT = RunnerConfig(n=2, num_cpus=0.1, placement_timeout_s=0.02, start_timeout_s=0.02)


class Actor:
    """A runner that is up when `up` is set, or fails."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.up, self.error = asyncio.Event(), error
        self.ready = SimpleNamespace(remote=self._ready)

    async def _ready(self) -> None:
        if self.error is not None:
            raise self.error
        await self.up.wait()


def states(*sequence: StartState) -> Callable[[Mapping[str, Any], float], dict[str, StartState]]:
    """Return a reader of states in which all late actors have the next state of a sequence; the last one
    stays."""
    left = list(sequence)

    def read(actors: Mapping[str, Any], num_cpus: float) -> dict[str, StartState]:
        return dict.fromkeys(actors, left.pop(0) if len(left) > 1 else left[0])

    return read


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.5})


async def test_a_runner_without_resources_is_a_placement_error(two_cpus: None) -> None:
    config = SHORT.model_copy(update={"num_cpus": 1.5})
    up = Actor()
    up.up.set()
    start = StartUp({"runner-0": up, "runner-1": Actor()}, config, states(UNPLACED))
    with pytest.raises(
        PlacementError,
        match=r"1 of 2 runners cannot be placed: each needs 1.5 CPU. After 0.02 s "
        r"\(runner.placement_timeout_s\) the cluster of 1 node\(s\) has 2 CPU, free now 0.5 CPU",
    ):
        await start.wait()


async def test_a_runner_without_resources_waits_for_its_own_deadline(two_cpus: None) -> None:
    config = SHORT.model_copy(update={"placement_timeout_s": 0.2})
    began = asyncio.get_running_loop().time()
    with pytest.raises(PlacementError):
        await StartUp({"runner-0": Actor()}, config, states(UNPLACED)).wait()
    assert asyncio.get_running_loop().time() - began >= 0.2


async def test_a_placed_runner_without_progress_is_a_slow_start(caplog: pytest.LogCaptureFixture) -> None:
    start = StartUp({"runner-0": Actor()}, SHORT, states(LOADING))
    with pytest.raises(RunnerLostError) as raised:
        await start.wait()
    message = str(raised.value)
    assert "1 of 1 runners made no progress for 0.02 s (runner.start_timeout_s)" in message
    assert "runner-0 is importing the agent in process 4711 (`ray logs actor --id ab12`)" in message
    assert "runner={'start_timeout_s': ...}" in message
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "have resources but are not up yet" in caplog.text


async def test_progress_gives_a_slow_runner_more_time() -> None:
    actor, seen = Actor(), 0

    def read(actors: Mapping[str, Any], num_cpus: float) -> dict[str, StartState]:
        nonlocal seen
        seen += 1
        if seen == 5:
            loop.call_soon_threadsafe(actor.up.set)
        return {"runner-0": StartState("loading", seen)}

    loop = asyncio.get_running_loop()
    await StartUp({"runner-0": actor}, SHORT, read).wait()
    assert seen >= 5  # checks, each of them at the end of a deadline


@pytest.mark.parametrize(
    ("bundle", "waiting", "pid", "phase"),
    [
        ({"CPU": 0.1}, {"CPU": 0.1}, 0, "unplaced"),
        ({"CPU": 0.1}, {"CPU": 0.1}, 4711, "loading"),
        ({"CPU": 0.1}, {"CPU": 0.5}, 0, "starting"),
        ({"CPU": 0.1}, {"CPU": 0.1, "GPU": 1.0}, 0, "starting"),
        ({"CPU": 0.0}, {"GPU": 1.0}, 0, "starting"),
        ({"CPU": 0.0}, {}, 0, "starting"),
        ({"CPU": 0.0, "agents": 1.0}, {"agents": 1.0}, 0, "unplaced"),
        ({"CPU": 0.1, "agents": 1.0}, {"CPU": 0.1}, 0, "starting"),
    ],
)
def test_what_other_programs_wait_for_is_not_taken_for_a_runner(
    bundle: dict[str, float],
    waiting: dict[str, float],
    pid: int,
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demand = SimpleNamespace(bundles_by_count=[SimpleNamespace(bundle=waiting)])
    status = SimpleNamespace(resource_demands=SimpleNamespace(ray_task_actor_demand=[demand]))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.7:6379"))
    monkeypatch.setattr(start_up, "get_cluster_status", lambda address: status)
    monkeypatch.setattr(start_up.ray_state, "actors", lambda actor_id: {"Pid": pid} if pid else {})
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "ab12"))
    assert read_start_states({"runner-0": actor}, bundle)["runner-0"].phase == phase


async def test_a_runner_that_fails_ends_the_start_at_once() -> None:
    message = "boom\nModuleNotFoundError: No module named 'agents'"
    failed = Actor(RayActorError(error_msg=message, actor_init_failed=True))
    with pytest.raises(RunnerLostError, match=r"No module named 'agents'.*must be importable on every node"):
        await StartUp({"runner-0": Actor(), "runner-1": failed}, RunnerConfig(), states(STARTING)).wait()


async def test_runners_that_are_up_are_reported_before_another_fails() -> None:
    for _ in range(20):  # the tasks of a set have another order each time
        actors = {f"runner-{number}": Actor() for number in range(3)}
        actors["runner-1"].error = RayActorError(error_msg="boom", actor_init_failed=True)
        for actor in actors.values():
            actor.up.set()
        up: list[str] = []
        start = StartUp(actors, RunnerConfig(), states(STARTING), lambda name, node, up=up: up.append(name))
        with pytest.raises(RunnerLostError, match="boom"):
            await start.wait()
        assert sorted(up) == ["runner-0", "runner-2"]


async def test_a_runner_that_dies_is_returned_at_once() -> None:
    killed = RayActorError(error_msg="The actor died unexpectedly before finishing this task")
    actors = {"runner-0": Actor(), "runner-1": Actor(killed)}
    assert await StartUp(actors, RunnerConfig(), states(STARTING)).wait() == {"runner-1": killed}


async def test_a_cancelled_start_leaves_no_task() -> None:
    start = asyncio.create_task(StartUp({"runner-0": Actor()}, RunnerConfig(), states(STARTING)).wait())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert asyncio.all_tasks() == {asyncio.current_task()}
