"""Start of actors on a real cluster: missing resources are distinguished from a slow start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
from ray_cluster import Cluster, eventually

from raylight.config import RunnerConfig
from raylight.errors import PlacementError, RunnerLostError
from raylight.runner.pool import StartUp, read_start_states


@ray.remote
class Gated:
    """Actor whose constructor waits until another process writes to a named pipe, like a slow import."""

    def __init__(self, pipe: str | None) -> None:
        if pipe is not None:
            Path(pipe).read_text()

    async def ready(self) -> None:
        pass


@pytest.mark.slow
async def test_a_slow_start_is_not_taken_for_missing_resources(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    config = RunnerConfig(num_cpus=0.2, placement_timeout_s=0.5, start_timeout_s=60)
    with cluster.connected():
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # names another cluster than address="local"
        slow = Gated.options(num_cpus=0.2).remote(str(pipe))
        eventually(
            lambda: read_start_states({"runner-0": slow}, {"CPU": 0.2})["runner-0"].phase == "loading",
            60,
            "its process",
        )
        state = read_start_states({"runner-0": slow}, {"CPU": 0.2})["runner-0"]
        assert f"is importing the agent in process {state.pid}" in str(state)

        def open_gate(*_: object) -> dict:
            pipe.write_text("open")  # after the first deadline
            return {"runner-0": state}

        assert await StartUp({"runner-0": slow}, config, open_gate).wait() == {}
        ray.kill(slow)
    assert "have resources but are not up yet" in caplog.text


@pytest.mark.slow
async def test_a_killed_process_is_not_taken_for_an_agent_that_fails(
    cluster: Cluster, tmp_path: Path
) -> None:
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    config = RunnerConfig(num_cpus=0.2)
    with cluster.connected():
        actors = {"runner-0": Gated.options(num_cpus=0.2).remote(str(pipe))}
        eventually(
            lambda: read_start_states(actors, {"CPU": 0.2})["runner-0"].phase == "loading", 60, "its process"
        )
        os.kill(read_start_states(actors, {"CPU": 0.2})["runner-0"].pid, signal.SIGKILL)
        assert list(await StartUp(actors, config).wait()) == ["runner-0"]
        broken = Gated.options(num_cpus=0.2).remote(str(tmp_path / "missing"))
        with pytest.raises(RunnerLostError, match=r"did not start: .*FileNotFoundError"):
            await StartUp({"runner-1": broken}, config).wait()


@pytest.mark.slow
async def test_the_resources_that_an_actor_lacks_are_named(cluster: Cluster) -> None:
    config = RunnerConfig(num_cpus=1.5, placement_timeout_s=5)
    with cluster.connected():
        actors = {f"runner-{i}": Gated.options(num_cpus=1.5).remote(None) for i in range(2)}
        with pytest.raises(PlacementError, match=r"1 of 2 runners cannot be placed: each needs 1.5 CPU"):
            await StartUp(actors, config).wait()
        for actor in actors.values():
            ray.kill(actor)
