"""Order of events where learners and engines are on the same GPUs. Only the device's calls are faked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from raylight.algorithms.policy_gradient import GRPO
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig
from raylight.learner import actor as actors
from raylight.learner.actor import LearnerActor
from raylight.trainer import policy_session
from raylight.trainer.policy_session import PolicySession


class Events:
    """A component whose methods are recorded, and take a turn of the event loop."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> dict[str, float]:
            self._seen.append(f"{self._name}.{method}")
            await asyncio.sleep(0)
            self._seen.append(f"{self._name}.{method} done")
            return {}

        return call


class ReachedError(Exception):
    """The start has come to the point after the components."""


def make_session(seen: list[str], monkeypatch: pytest.MonkeyPatch, learner: float, engine: float) -> Any:
    session: Any = object.__new__(PolicySession)
    session.plan = SimpleNamespace(
        name="run",
        model_path="m",
        seed=0,
        total_steps=1,
        store=None,
        store_path="",
        output_dir="out",
        checkpoint=CheckpointConfig(),
        algorithm=GRPO(model="m"),
        learner=LearnerConfig(num_gpus=learner),
        engine=EngineConfig(num_gpus=engine, sleep_while_learning=True),
        shares_gpus=0 < learner < 1 and engine > 0,
    )
    session._reopens_store = False
    session._stack = SimpleNamespace(callback=lambda *_: None, push_async_callback=lambda *_: None)
    session._show_stage = lambda text: None
    session._reported_no_sleep, session.version = False, 0

    async def nothing(*_: Any) -> Any:
        return 0

    async def reached(*_: Any) -> None:
        raise ReachedError

    learners, publications = Events("learners", seen), Events("publications", [])
    monkeypatch.setattr(publications, "learners_busy", asyncio.Lock(), raising=False)
    monkeypatch.setattr(policy_session, "Publications", lambda *_: publications)
    monkeypatch.setattr(learners, "check_storage", reached)
    monkeypatch.setattr(learners, "stop", lambda: None)
    monkeypatch.setattr(policy_session, "LearnerGroup", lambda *_: learners)
    for name in ("_reserve", "_start_coordinator", "_sampling_seed"):
        setattr(session, name, nothing)
    session._start_store = lambda: None
    session._make_deployment = lambda *_: Events("engines", seen)
    session._make_pool = lambda: Events("runners", seen)
    session.learners, session.replicas = learners, Events("engines", seen)
    session._coordinator, session._publications = None, publications
    return session


async def test_engines_start_when_the_learners_have_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with pytest.raises(ReachedError):
        await make_session(seen, monkeypatch, 0.6, 0.4)._start()
    assert seen.index("learners.setup done") < seen.index("engines.start")
    assert seen.index("runners.start") < seen.index("engines.start")


@pytest.mark.parametrize(("learner", "engine"), [(1, 1), (0, 0), (0, 0.4)])
async def test_all_start_at_once_on_hardware_of_their_own(
    monkeypatch: pytest.MonkeyPatch, learner: float, engine: float
) -> None:
    seen: list[str] = []
    with pytest.raises(ReachedError):
        await make_session(seen, monkeypatch, learner, engine)._start()
    assert seen.index("engines.start") < seen.index("learners.setup done")


async def test_engines_sleep_during_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    session = make_session(seen, monkeypatch, 0.6, 0.4)
    await session.update(None)
    done = [event for event in seen if event.endswith("done")]
    assert done == ["engines.sleep done", "learners.update done", "engines.wake done"]


@pytest.mark.parametrize(("gpus", "released"), [(0.6, True), (1, False), (0, False)])
def test_a_learner_returns_the_memory_of_an_update_to_a_shared_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: float, released: bool
) -> None:
    import torch

    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty_cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    actor: Any = LearnerActor(0, 1, LearnerConfig(num_gpus=gpus))
    actor._policy = SimpleNamespace(
        engine=SimpleNamespace(get_data_parallel_rank=lambda: 0),
        update_shard=lambda _: seen.append("update") or {},
    )
    monkeypatch.setattr(actors.ray, "get", lambda reference: reference)
    actor.update([None])
    assert seen == ["update", *["empty_cache"] * released]
