"""Single tasks in this process: their rewards, resources, hooks and errors."""

from typing import Any

import pytest
from unit_helpers import within

from raylight.agent.decorators import rollout
from raylight.agent.hooks import Hook
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.errors import AgentSignatureError, ConfigError, RolloutsFailedError
from raylight.runner.local_runner import LitAgentRunner
from raylight.store.client import StoreClient
from raylight.traces.reward_spans import find_final_reward
from raylight.traces.tracer import DummyTracer
from raylight.types import AttemptedRollout

URL = "http://127.0.0.1:1/v1"


async def step(
    agent: Any, store: StoreClient, task: Any = 3, hooks: Any = (), **more: Any
) -> AttemptedRollout:
    runner = LitAgentRunner[Any](DummyTracer())
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        async with within():
            return await runner.step(task, **more)


async def test_a_task_is_run_and_stored(store: StoreClient) -> None:
    @rollout(tool=7)
    async def agent(task: int, llm: LLM, tool: int) -> float:
        return float(task + tool) if llm.endpoint == URL else 0.0

    done = await step(
        agent, store, resources={"llm": LLM(endpoint=URL, model="m", traced=True)}, mode="train"
    )
    assert (type(done), done.status, done.attempt.status) == (AttemptedRollout, "succeeded", "succeeded")
    assert (done.mode, done.attempt.worker_id) == ("train", "worker-0")
    assert find_final_reward(await store.query_spans(done.rollout_id)) == 10.0
    again = await step(agent, store, task=1)  # with the latest resources
    assert find_final_reward(await store.query_spans(again.rollout_id)) == 8.0


async def test_an_agent_class_and_hooks_find_the_runner(store: StoreClient) -> None:
    seen: list[Any] = []

    class Agent(LitAgent[int]):
        def validation_rollout(self, task: int, resources: Any, rollout: Any) -> float:
            seen.append((type(self.tracer), self.runner.worker_id, self.trainer.n_runners))
            return 1.0

    class Seen(Hook):
        async def on_rollout_end(self, *, runner: Any, rollout: Any, **_: Any) -> None:
            seen.append((runner.worker_id, rollout.input))

    await step(Agent(), store, hooks=[Seen()], mode="val")
    assert seen == [(DummyTracer, "worker-0", 1), ("worker-0", 3)]


async def test_an_error_of_the_agent_is_raised_with_its_traceback(store: StoreClient) -> None:
    @rollout
    def agent(task: int) -> float:
        raise KeyError("the agent's own")

    with pytest.raises(RolloutsFailedError, match=r"(?s)KeyError: .the agent's own.*test_local_runner.py"):
        await step(agent, store)
    (failed,) = await store.query_rollouts()
    assert failed.status == "failed"


async def test_what_cannot_be_run_is_an_error_before_anything_runs(store: StoreClient) -> None:
    agent = rollout(lambda task, llm: 1.0)
    with pytest.raises(AgentSignatureError, match="'llm'"):
        await step(agent, store)
    with pytest.raises(ConfigError, match="'llm' is an LLM without an endpoint"):
        await step(agent, store, resources={"llm": LLM(model="m")})
    with pytest.raises(ConfigError, match="inside `with run_context"):
        await LitAgentRunner[int]().step(1)
    with pytest.raises(ConfigError, match="give a function decorated with @rollout"):
        await step(lambda task: 1.0, store)
    assert await store.query_rollouts() == []
