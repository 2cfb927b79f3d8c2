"""One attempt: its time limited, its hooks called, its agent given what it asks for; whatever the agent does
becomes an outcome."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from unit_helpers import Endless, Odd, Unprintable, make_context, make_rollout, run_attempt, until, within

from raylight._utils.agent_threads import AgentThreads
from raylight.agent.attempt_keys import key_use
from raylight.agent.emit import emit_reward
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, ProxyLLM
from raylight.errors import RewardError
from raylight.runner import execute as module
from raylight.runner.execute import execute
from raylight.runner.outcome import HIDDEN_FRAMES, Outcome
from raylight.traces.reward_spans import find_final_reward
from raylight.types import GREEDY, Rollout, Span


def raising(error: BaseException) -> Callable[[Any], None]:
    """Return an agent that raises."""

    def agent(task: Any) -> None:
        raise error

    return agent


def raising_later(error: BaseException) -> Callable[[Any], Awaitable[None]]:
    """Return an asynchronous agent that raises."""

    async def agent(task: Any) -> None:
        raise error

    return agent


# results


async def test_a_reward_becomes_a_span_of_the_attempt_with_the_injected_time() -> None:
    outcome, spans = await run_attempt(lambda task: {"main": 0.5, "style": 2.0})
    assert outcome == Outcome("succeeded")
    assert find_final_reward(spans) == 0.5
    assert (spans[0].rollout_id, spans[0].attempt_id, spans[0].start_time) == ("ro-1", "at-1", 7.0)


async def test_no_reward_is_success_without_a_span() -> None:
    assert await run_attempt(lambda task: None) == (Outcome("succeeded"), [])


async def test_the_returned_reward_comes_after_those_that_were_emitted() -> None:
    def agent(task: int) -> float:
        emit_reward(0.25)
        return 0.75

    _, spans = await run_attempt(agent)
    assert len(spans) == 2
    assert find_final_reward(spans) == 0.75


async def test_returned_spans_belong_to_the_attempt_whatever_they_say() -> None:
    mine = Span.from_attributes(name="mine", attributes={}, rollout_id="other", attempt_id="another")
    _, (span,) = await run_attempt(lambda task: [mine])
    assert (span.rollout_id, span.attempt_id, span.span_id) == ("ro-1", "at-1", mine.span_id)
    assert mine.rollout_id == "other"


@pytest.mark.parametrize(
    ("returned", "kind"), [("good", "reward"), ([1.0], "reward"), ({}, "reward"), (float("nan"), "reward")]
)
async def test_a_wrong_reward_is_a_failure_of_its_own_kind(returned: Any, kind: str) -> None:
    outcome, spans = await run_attempt(lambda task: returned)
    assert (outcome.status, outcome.failure.kind, spans) == ("failed", kind, [])


async def test_a_span_that_cannot_be_stored_is_the_agents_failure() -> None:
    outcome, spans = await run_attempt(
        lambda task: [Span.from_attributes(name="mine", attributes={"wrong": object()})]
    )
    assert (outcome.status, outcome.failure.kind, spans) == ("failed", "agent", [])
    assert "mine" in outcome.failure.error


async def test_an_agent_that_raises_a_reward_error_said_a_wrong_reward() -> None:
    outcome, _ = await run_attempt(raising(RewardError("the reward is a word")))
    assert outcome.failure.kind == "reward"


async def test_the_trace_of_a_failure_shows_the_agent_and_none_of_raylight() -> None:
    def deep_in_the_agent() -> None:
        raise KeyError("tool")

    async def asynchronous(task: int) -> None:
        deep_in_the_agent()

    def synchronous(task: int) -> None:
        deep_in_the_agent()

    for agent in (asynchronous, synchronous):
        failure = (await run_attempt(agent))[0].failure
        assert failure.kind == "agent"
        assert "deep_in_the_agent" in failure.trace
        assert failure.trace.rstrip().endswith("KeyError: 'tool'")
        assert HIDDEN_FRAMES[0] not in failure.trace


# time


async def test_an_agent_that_takes_too_long_times_out() -> None:
    agent = Endless()
    outcome, _ = await run_attempt(agent.run, timeout=0.02)
    assert (outcome.status, outcome.failure.kind) == ("timeout", "timeout")
    assert "0.02 s" in outcome.failure.error
    assert agent.cleaned.is_set()


async def test_spans_from_before_the_timeout_stay() -> None:
    async def endless(task: int) -> None:
        emit_reward(0.5)
        await asyncio.Event().wait()

    outcome, spans = await run_attempt(endless, timeout=0.02)
    assert (outcome.status, len(spans)) == ("timeout", 1)


async def test_a_blocking_agent_that_takes_too_long_times_out_and_is_counted_until_it_returns() -> None:
    leave, threads = threading.Event(), AgentThreads()
    outcome, _ = await run_attempt(lambda task: leave.wait(60), timeout=0.02, threads=threads)
    assert (outcome.status, threads.abandoned) == ("timeout", 1)
    leave.set()
    await until(lambda: threads.abandoned == 0)


async def test_an_agent_that_swallows_its_cancellation_is_left_alone_after_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CANCEL_GRACE_S", 0.02)
    leave, threads = asyncio.Event(), AgentThreads()

    async def stubborn(task: int) -> None:
        while not leave.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await leave.wait()
        raise ValueError("nobody hears this")

    outcome, _ = await run_attempt(stubborn, timeout=0.02, threads=threads)
    assert (outcome.status, threads.abandoned) == ("timeout", 1)
    leave.set()
    await until(lambda: threads.abandoned == 0)


async def test_an_agent_that_cleans_up_within_the_grace_is_not_abandoned() -> None:
    threads, steps = AgentThreads(), []

    async def slow_to_leave(task: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for step in range(50):
                await asyncio.sleep(0)
                steps.append(step)

    outcome, _ = await run_attempt(slow_to_leave, timeout=0.02, threads=threads)
    assert (outcome.status, threads.abandoned, len(steps)) == ("timeout", 0, 50)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_timeout_of_the_agents_own_is_the_agents_failure(asynchronous: bool) -> None:
    async def impatient(task: int) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    outcome, _ = await run_attempt(impatient if asynchronous else raising(TimeoutError("my own tool")))
    assert (outcome.status, outcome.failure.kind) == ("failed", "agent")


async def test_no_limit_is_possible() -> None:
    assert (await run_attempt(lambda task: 1.0, timeout=None))[0].status == "succeeded"


# whatever the agent does


ERRORS = [
    asyncio.CancelledError("of the agent's own"),
    StopIteration(3),
    StopAsyncIteration(),
    Unprintable(),
    SystemExit(3),
    ExceptionGroup("two", [ValueError(), KeyError()]),
    BaseExceptionGroup("base", [Odd(), ValueError()]),
    Odd("base"),
    KeyboardInterrupt(),
    GeneratorExit(),
    MemoryError(),
    RecursionError(),
    FileNotFoundError("/tmp/\udcff"),
    AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_whatever_an_agent_raises_becomes_an_outcome(error: BaseException, asynchronous: bool) -> None:
    """Run each in a new event loop, because some of these errors end it."""

    agent = raising_later(error) if asynchronous else raising(error)
    outcome, _ = asyncio.run(run_attempt(agent, timeout=None))
    assert (outcome.status, outcome.failure.kind) == ("failed", "agent")
    assert outcome.failure.model_dump_json()


async def test_an_agent_without_a_method_for_the_mode_fails() -> None:
    class Trains(LitAgent):
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    outcome, _ = await run_attempt(Trains(), rollout=make_rollout(mode="val"))
    assert "AgentSignatureError: Trains must define rollout" in outcome.failure.error


async def test_cancelling_the_attempt_is_no_outcome_and_reaches_the_agent() -> None:
    agent = Endless()
    running = asyncio.create_task(run_attempt(agent.run))
    async with within():
        await agent.inside.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert agent.cleaned.is_set()


# what the agent is given


async def test_an_asynchronous_agent_runs_on_the_loop_and_a_synchronous_one_in_a_thread() -> None:
    places = []

    async def asynchronous(task: int) -> float:
        places.append(threading.current_thread())
        return float(task)

    def synchronous(task: int) -> float:
        places.append(threading.current_thread())
        return float(task)

    assert find_final_reward((await run_attempt(asynchronous))[1]) == 3.0
    assert find_final_reward((await run_attempt(synchronous))[1]) == 3.0
    assert find_final_reward((await run_attempt(functools.partial(asynchronous)))[1]) == 3.0
    here = threading.current_thread()
    assert [place is here for place in places] == [True, False, True]


async def test_each_model_is_scoped_to_the_attempt_as_its_kind_wants() -> None:
    given: dict[str, Any] = {}

    def agent(
        task: int, planner: LLM, coder: LLM, judge: LLM, proxied: LLM, table: dict, rollout: Rollout
    ) -> None:
        given.update(planner=planner, coder=coder, judge=judge, proxied=proxied, table=table, rollout=rollout)

    traced = LLM(endpoint="http://engine/run", model="policy", traced=True)
    judge, table = LLM(endpoint="http://judge/v1", model="j", api_key="mine"), {"a": 1}
    proxied = ProxyLLM(endpoint="http://proxy/v1", model="p", api_key="theirs")
    await run_attempt(
        agent, planner=traced.for_agent("planner"), coder=traced, judge=judge, proxied=proxied, table=table
    )
    route = "rollout/ro-1/attempt/at-1"
    assert given["coder"].endpoint == f"http://engine/run/{route}/v1"
    assert given["planner"].endpoint == f"http://engine/run/{route}/agent/planner/v1"
    assert key_use(given["coder"].api_key, "secret", "ro-1", "at-1") in ("model", "train")
    assert key_use(given["coder"].traces_key, "secret", "ro-1", "at-1") == "traces"
    assert given["judge"].traces_key is None
    assert given["planner"].api_key == given["coder"].api_key
    assert given["judge"] is judge
    assert (given["proxied"].endpoint, given["proxied"].api_key) == (f"http://proxy/{route}/v1", "theirs")
    assert type(given["proxied"]) is LLM
    assert given["table"] is table
    assert given["rollout"].rollout_id == "ro-1"
    assert traced.endpoint == "http://engine/run"


@pytest.mark.parametrize(
    ("mode", "metadata", "use"),
    [
        ("train", {}, "train"),
        ("train", {GREEDY: True}, "model"),
        ("val", {}, "model"),
        ("test", {}, "model"),
        (None, {}, "model"),
    ],
)
async def test_only_rollouts_whose_calls_are_trained_have_a_key_for_training(
    mode: Any, metadata: dict[str, Any], use: str
) -> None:
    given: list[LLM] = []

    async def agent(task: int, llm: LLM) -> float:
        given.append(llm)
        return 1.0

    traced = LLM(endpoint="http://engine/run", model="policy", traced=True)
    outcome, _ = await run_attempt(
        agent, rollout=make_rollout(task=3, mode=mode, metadata=metadata), llm=traced
    )
    assert outcome.failure is None
    assert key_use(given[0].api_key or "", "secret", "ro-1", "at-1") == use


async def test_only_a_dequeued_rollout_is_executed() -> None:
    rollout = make_rollout()
    context = make_context(lambda task: None)
    with context.tracer.attempt(rollout) as trace, pytest.raises(AssertionError, match="dequeued"):
        await execute(context, rollout.model_copy(update={"attempt": None}), {}, trace)
