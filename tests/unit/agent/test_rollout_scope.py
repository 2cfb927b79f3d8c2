"""An agent's tracer, runner and trainer: there inside a rollout, a clear error elsewhere."""

import copy
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest
from unit_helpers import enqueue, make_context, make_rollout, make_runner, within

from raylight.agent.hooks import Hook
from raylight.agent.litagent import LitAgent, TrainerView
from raylight.config import RunnerConfig
from raylight.errors import OutsideRolloutError
from raylight.runner.actor import RunnerActor, RunnerPayload
from raylight.runner.execute import execute
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.tracer import DummyTracer


class Looking(LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
        rollout.metadata["found"] = [self.tracer, self.runner, self.trainer.n_runners]


class LookingAsync(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        rollout.metadata["found"] = [self.tracer, self.runner, self.trainer.n_runners]


class LookingHook(Hook):
    async def on_rollout_end(self, *, agent: Any, rollout: Any, **_: Any) -> None:
        rollout.metadata["hook"] = [agent.tracer, agent.runner]


@pytest.mark.parametrize("agent", [Looking(), LookingAsync()])
async def test_an_agent_and_a_hook_find_them_inside_a_rollout(agent: LitAgent[Any]) -> None:
    context = make_context(agent, hooks=[LookingHook()], runner="the runner")
    context = replace(context, trainer=TrainerView(context.tracer, n_runners=3))
    rollout = make_rollout(task=1, timeout=5.0)
    with context.tracer.attempt(rollout) as trace:
        async with within():
            assert (await execute(context, rollout, {}, trace)).failure is None
    assert rollout.metadata["found"] == [context.tracer, "the runner", 3]
    assert rollout.metadata["hook"] == [context.tracer, "the runner"]
    for name in ("tracer", "runner", "trainer"):
        with pytest.raises(OutsideRolloutError, match=f"{type(agent).__name__}.{name} exists only inside"):
            getattr(agent, name)
        assert not hasattr(agent, name)


async def test_a_runner_gives_its_store_and_agent_to_hooks() -> None:
    seen: list[Any] = []

    class Ask(Hook):
        async def on_rollout_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
            found = await runner.get_store().get_rollout_by_id(rollout.rollout_id)
            seen.append((found.input, runner.get_agent() is agent, runner.tracer is tracer))

    store = StoreClient(StoreService())
    await enqueue(store, ["task"])
    runner = make_runner(store, lambda task: None, hooks=[Ask()], max_rollouts=1, tracer=DummyTracer())
    async with within():
        await runner.serve()
    assert seen == [("task", True, True)]


async def test_a_runner_actor_gives_the_trainers_settings_to_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    class Asking(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
            view = self.trainer
            seen.append((view.n_runners, view.max_rollouts, view.tracer, view.hooks))

    store, hook, tracer = StoreClient(StoreService()), Hook(), DummyTracer()
    await enqueue(store, [1])
    payload = RunnerPayload(Asking(), tracer, [hook])
    direct_at_import: list[str] = []

    def load(pickled: bytes) -> RunnerPayload:
        direct_at_import.extend(os.environ["NO_PROXY"].split(","))
        return payload

    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("no_proxy", "intranet")
    monkeypatch.setattr(RunnerPayload, "unpickle", load)
    async with within():
        await RunnerActor("w", store, b"pickled", RunnerConfig(n=3, max_rollouts=1), ("head",)).serve()
    assert seen == [(3, 1, tracer, (hook,))]
    assert direct_at_import == ["intranet", "127.0.0.1", "localhost", "::1", "head"]


def test_an_attribute_of_the_agents_own_precedes() -> None:
    class Own(LitAgent[Any]):
        def __init__(self) -> None:
            self.tracer = "mine"

    agent = Own()
    assert agent.tracer == copy.copy(agent).tracer == "mine"


def test_agents_are_pickled_without_them() -> None:
    assert vars(pickle.loads(pickle.dumps(Looking()))) == vars(Looking())
