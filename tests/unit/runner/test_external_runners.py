"""External runners without Ray: missed heartbeats, and a run that is gone
before they join."""

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from unit_helpers import within

from raylight.config import RunnerConfig
from raylight.errors import ConfigError, RunnerLostError
from raylight.quickstart.agent import adder
from raylight.runner import external_runners
from raylight.runner.actor import RunnerPayload
from raylight.runner.external_runners import ExternalRunners
from raylight.trainer.ray_session.connection import Connection
from raylight.trainer.runs import join_run
from raylight.trainer.runs.join_run import RemoteRunnerProcess
from raylight.trainer.spec.arguments import TrainerArguments


class Beating:
    """Store with one worker that sends `beats` heartbeats, one every `every` seconds."""

    def __init__(self, every: float, beats: int) -> None:
        self.every, self.beats = every, beats
        self.began = asyncio.get_running_loop().time()

    async def query_workers(self, **filters: Any) -> list[Any]:
        number = min(int((asyncio.get_running_loop().time() - self.began) / self.every), self.beats)
        return [SimpleNamespace(worker_id="w", last_heartbeat_time=float(number))]


async def test_runners_are_lost_when_they_are_silent_and_not_between_two_heartbeats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(external_runners, "HEARTBEAT_TIMEOUT_S", 0.6)
    store = Beating(every=0.2, beats=5)
    config = RunnerConfig(start_timeout_s=0.05, stuck_after_s=0.02)  # both shorter than a heartbeat
    runners = ExternalRunners("night", config, store, RunnerPayload(adder))  # type: ignore[arg-type]
    async with within():
        with pytest.raises(RunnerLostError, match="raylight runner AGENT --run night"):
            await runners.watch()
    assert asyncio.get_running_loop().time() - store.began >= 5 * 0.2 + 0.6
    assert not caplog.records


class Gone:
    """A rendezvous whose actor died."""

    def __getattr__(self, method: str) -> Any:
        async def remote() -> None:
            raise RayActorError

        return SimpleNamespace(remote=remote)


async def test_a_run_that_ends_before_its_runners_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def session(*arguments: Any) -> Iterator[Any]:
        yield Connection(False, "joined a cluster")

    async def find_rendezvous(run: str, timeout: float) -> Gone:
        return Gone()

    monkeypatch.setattr(join_run, "ray_session", session)
    monkeypatch.setattr(join_run, "find_rendezvous", find_rendezvous)
    payload, arguments = RunnerPayload(adder), TrainerArguments(progress=False)
    with pytest.raises(ConfigError, match="'night' ended before the runners joined"):
        await RemoteRunnerProcess("night", payload, RunnerConfig(), arguments).work()
    async with within():
        await join_run._end_of(Gone())
