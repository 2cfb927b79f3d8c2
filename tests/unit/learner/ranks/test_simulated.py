"""The simulated learner: time passes, versions count and reach the engines, and a run resumes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from coordinator_helpers import Coordinator, RunningReplica, Versions
from unit_helpers import within

from raylight.config import LearnerConfig
from raylight.errors import ConfigError, LearnerError, TransferBrokenError, WeightSyncError
from raylight.experience.batches.batch import TrainBatch
from raylight.learner.ranks.simulated import SimulatedLearner
from raylight.learner.state.checkpoints import TrainingStates
from raylight.weights.sender import PublicationSettings

TIMES = LearnerConfig(kind="simulated", step_s=30, sync_s=2)


def learner_with_clock() -> tuple[SimulatedLearner, list[float]]:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    return SimulatedLearner(TIMES, wait), waited


async def publish(learner: SimulatedLearner, coordinator: Coordinator, version: int) -> int:
    settings = PublicationSettings("gloo", "float32", "module", 5.0, 0.0, coordinator)
    publishing = asyncio.create_task(coordinator.client.publish(version, None, 5.0, token=f"v{version}"))
    try:
        await learner.publish_weights(version, f"v{version}", settings)
    except WeightSyncError as error:
        await coordinator.fail_publication(f"v{version}", str(error))
        raise
    finally:
        await asyncio.wait([publishing])
        publishing.exception()
    return len(publishing.result())


async def test_an_update_takes_its_time_and_counts_the_version() -> None:
    learner, waited = learner_with_clock()
    batch = TrainBatch([1.0], ["g"], [], [])
    metrics = await learner.update(batch)
    await learner.update(batch)
    assert waited == [30, 30]
    assert learner.version == 2
    assert metrics["learner/rows"] == 0


async def test_engines_keep_their_weights_and_learn_the_version() -> None:
    learner, waited = learner_with_clock()
    coordinator = Coordinator()
    async with within():
        replicas = [RunningReplica(coordinator, name) for name in "ab"]
        for replica in replicas:
            await replica.start()
        for version in (1, 2):
            assert await publish(learner, coordinator, version) == 2
        assert [replica.engine.phases for replica in replicas] == [["start", "finish"] * 2] * 2
        assert [replica.engine.version for replica in replicas] == [2, 2]
        assert coordinator.versions() == Versions(2)
    assert waited == [2, 2]


async def test_a_broken_transfer_is_repeated_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, _ = learner_with_clock()
    coordinator = Coordinator()
    failures = 2
    run_phase = coordinator.run_phase

    async def break_some(kind: str, *args: Any) -> None:
        nonlocal failures
        if kind == "start" and failures:
            failures -= 1
            raise TransferBrokenError("a was lost")
        await run_phase(kind, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator, "run_phase", break_some)
    async with within():
        await RunningReplica(coordinator, "a").start()
        assert await publish(learner, coordinator, 1) == 1
        failures = 3
        with pytest.raises(WeightSyncError, match="a was lost"):
            await publish(learner, coordinator, 2)


async def test_a_state_holds_the_position_of_the_run(tmp_path: Path) -> None:
    learner, _ = learner_with_clock()
    for step in (1, 2, 3):
        await learner.save_state(str(tmp_path), step, {"version": step}, keep=2, timeout_s=5)
    states = TrainingStates(str(tmp_path))
    assert states.steps() == [2, 3]
    assert states.metadata(3) == {"version": 3}
    await learner.load_state(str(tmp_path), 3, 7)
    assert learner.version == 7


async def test_what_it_lacks_is_an_error() -> None:
    learner, _ = learner_with_clock()
    with pytest.raises(LearnerError):
        await learner.restart()
    with pytest.raises(ConfigError, match="no adapter"):
        await learner.export_adapter()
