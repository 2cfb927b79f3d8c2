"""Rollouts stick to one of two engine replicas, and move to the other if theirs is killed mid-stream."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, get_args

import anthropic
import openai
import pytest
import ray
from ray_cluster import Cluster
from served_replicas import SECRET, replica_pid, served

from raylight.agent.decorators import rollout as decorate
from raylight.agent.hooks import HookDispatcher
from raylight.agent.resources import LLM
from raylight.runner.runner import Runner
from raylight.semconv import PROMPT_SOURCE
from raylight.traces.tracer import DummyTracer
from raylight.types import Budget, EnqueueRolloutRequest, RolloutConfig

HI = [{"role": "user", "content": "12+30="}]
DEADLINE_S = 150


async def ask(client: openai.AsyncOpenAI, messages: list[Any] = HI, **settings: Any) -> tuple[str, Any]:
    """Send a request. Return the name of the replica and the answer."""
    body = {"model": "policy", "max_tokens": 4} | settings
    raw = await client.chat.completions.with_raw_response.create(messages=messages, **body)
    return raw.headers["x-raylight-replica"], raw.parse()


@pytest.fixture
def connected(cluster: Cluster) -> Any:
    with ray.init(address=cluster.address, log_to_driver=False):
        yield
    cluster.assert_clean()


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_rollouts_move_when_a_replica_dies_mid_stream(tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), served(tmp_path, replicas=2, num_cpus=0.5) as model:
        first_answers: dict[str, str] = {}
        while len(first_answers) < 2:  # the ingress learns of a replica shortly after it is ready
            for rollout in await model.rollouts(12):
                replica, answer = await ask(model.client(rollout), temperature=2.0, max_tokens=16)
                first_answers.setdefault(replica, answer.choices[0].message.content)
        assert len(set(first_answers.values())) == 2, "the replicas draw the same random numbers"
        rollouts = await model.rollouts(12)
        homes = [(await ask(model.client(rollout)))[0] for rollout in rollouts]
        again = await asyncio.gather(*(ask(model.client(rollout)) for rollout in rollouts for _ in range(3)))
        moved = sum(home != homes[i // 3] for i, (home, _) in enumerate(again))
        assert moved <= len(again) // 4, "rollouts do not stick to their replica"

        loads = await model.coordinator.loads()
        assert set(loads) == set(first_answers)
        assert all(load.capacity and load.idle_s > 0 and not load.running for load in loads.values())

        victim = rollouts[0]
        home, first = await ask(model.client(victim))
        stream = await model.client(victim).chat.completions.create(
            model="policy", messages=HI, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        os.kill(replica_pid(home), signal.SIGKILL)
        with pytest.raises((openai.APIError, Exception), match=r".+"):
            async for _ in stream:
                pass

        # one retryable error; then another replica continues from the stored tokens
        turns = [
            *HI,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "1+1="},
        ]
        other, _ = await ask(model.client(victim, retries=8), turns)
        assert other != home
        assert home not in await model.coordinator.loads()
        await asyncio.gather(*(ask(model.client(rollout, retries=8)) for rollout in rollouts[1:]))
        repeats = {"x-stainless-retry-count": "1"}
        await ask(  # the interrupted call
            model.client(victim), max_tokens=1500, extra_body={"ignore_eos": True}, extra_headers=repeats
        )

        done = await model.store.finish_attempt(victim, "succeeded")
        assert done.status == "succeeded", "the dead replica's call blocks the rollout"
        (finished,) = await model.store.collect([victim.rollout_id], with_spans=True)
        kept = [call for call in finished.generations if call.finish_reason != "aborted"]
        assert len(kept) == 1 + 3 + 1 + 1 + 1
        spliced = [span for span in finished.spans if span.attributes.get(PROMPT_SOURCE) == "spliced"]
        assert len(spliced) == 1
        before = next(
            call
            for call in kept
            if call.prompt_ids.tolist() and call.output_ids.tolist() and call.key.call_id in first.id
        )
        after = next(call for call in kept if call.key.call_id == spliced[0].trace_id)
        assert after.prompt_ids.tolist()[: len(before.token_ids)] == before.token_ids.tolist()
        assert (await model.store.statistics())["calls_repeated"] == 1


async def loop_forever(task: str, llm: LLM) -> float:
    """Call the model until it refuses, with the SDK that the task names."""
    client: Any
    if task == "anthropic":
        base = llm.endpoint.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key=llm.api_key) as client:
            while True:
                await client.messages.create(model="policy", max_tokens=8, messages=HI)
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        while True:
            await client.chat.completions.create(model="policy", messages=HI, max_tokens=8)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_an_agent_that_loops_forever_ends_by_each_budget(tmp_path: Path) -> None:
    budgets: list[dict[str, Any]] = [{"max_turns": 3}, {"max_tokens": 20}, {"max_seconds": 0.5}]
    async with asyncio.timeout(DEADLINE_S), served(tmp_path) as model:
        llm = LLM(endpoint=f"{model.url}/v1", model="policy", traced=True)
        resources = await model.store.add_resources({"llm": llm})
        requests = [
            EnqueueRolloutRequest(
                input=sdk,
                mode="train",
                resources_id=resources.resources_id,
                config=RolloutConfig(**budget, truncated=treatment, truncated_reward=-1.0),
            )
            for sdk in ("openai", "anthropic")
            for budget in budgets
            for treatment in ("score", "fail")
        ]
        ids = [rollout.rollout_id for rollout in await model.store.enqueue_many_rollouts(requests)]
        runner = Runner(
            "w", model.store, decorate(loop_forever), DummyTracer(), HookDispatcher([]), SECRET, 12, 12, 60.0
        )
        await runner.serve()
        finished = await model.store.collect(ids)
    for request, item in zip(requests, finished, strict=True):
        assert item.rollout.attempt is not None
        (budget,) = request.config.model_dump(exclude_defaults=True).keys() & {*get_args(Budget)}
        assert item.rollout.attempt.truncated == budget
        if request.config.truncated == "fail":
            assert item.rollout.attempt.failure is not None
            assert item.rollout.attempt.failure.kind == "truncated"
        else:
            assert (item.rollout.status, item.reward) == ("succeeded", -1.0)
        lengths = [len(call.output_ids) for call in item.generations]
        if budget == "max_turns":
            assert len(lengths) == 3
        if budget == "max_tokens":
            assert sum(lengths) == 20


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_the_key_of_a_finished_attempt_is_revoked(tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), served(tmp_path) as model:
        one, other = await model.rollouts(2)
        await ask(model.client(one))
        with pytest.raises(openai.AuthenticationError):
            await ask(model.client(one, key_of=other))
        await model.store.finish_attempt(one, "succeeded")
        with pytest.raises(openai.AuthenticationError, match="revoked"):
            await ask(model.client(one))
        await ask(model.client(other))
