"""One attempt: its reward is read, its failure named, its time limited; whatever the agent does becomes an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from unit_helpers import make_rollout, within

from raylight.agent.keys import key_opens
from raylight.agent.litagent import LitAgent, rollout
from raylight.agent.resources import LLM
from raylight.errors import RewardError
from raylight.runner.execute import OUR_FRAMES, Outcome, classify, describe, execute, read_rewards
from raylight.types import find_final_reward

REQUEST = httpx.Request("POST", "http://engine/v1/chat/completions")


def answer_error(cls: type[openai.APIStatusError], code: int) -> openai.APIStatusError:
    return cls("no", response=httpx.Response(code, request=REQUEST), body=None)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def run(agent: Any, threads: ThreadPoolExecutor, *, timeout: float | None = 5.0, **resources: Any) -> Outcome:
    agent = agent if isinstance(agent, LitAgent) else rollout(agent)
    async with within(8):
        return await execute(agent, make_rollout(task=3, timeout=timeout), resources, "secret", threads, lambda: 7.0)


# rewards


@pytest.mark.parametrize(("returned", "expected"), [
    (1, 1.0), (0, 0.0), (-0.5, -0.5), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0),
    (np.float64(0.25), 0.25), (Fraction(1, 4), 0.25),
])  # fmt: skip
def test_a_number_is_a_reward(returned: Any, expected: float) -> None:
    rewards = read_rewards(returned)
    assert rewards == {"reward": expected}
    assert type(rewards["reward"]) is float


def test_named_rewards_keep_their_order() -> None:
    assert list(read_rewards({"main": 1, "style": np.float32(0.5)}).items()) == [("main", 1.0), ("style", 0.5)]


def test_nothing_is_no_reward() -> None:
    assert read_rewards(None) is None


@pytest.mark.parametrize("returned", [
    float("nan"), float("inf"), -float("inf"), np.float32("nan"), "1.0", "", b"1", [1.0], (1.0,), {}, {"a": None}, {"a": "1"},
    {"a": 1.0, "b": float("nan")}, {"a": {"b": 1.0}}, 1j, object(), np.array([1.0, 2.0]), 10**400,
], ids=repr)  # fmt: skip
def test_what_is_no_finite_number_is_refused(returned: Any) -> None:
    with pytest.raises(RewardError):
        read_rewards(returned)


def test_a_refused_reward_is_named_with_its_type() -> None:
    with pytest.raises(RewardError, match=r"'great'.*str"):
        read_rewards("great")
    with pytest.raises(RewardError, match="'style' is nan"):
        read_rewards({"main": 1.0, "style": float("nan")})


async def test_a_reward_becomes_a_span_with_the_injected_time(threads: ThreadPoolExecutor) -> None:
    outcome = await run(lambda task: {"main": 0.5, "style": 2.0}, threads)
    assert (outcome.status, outcome.failure) == ("succeeded", None)
    assert find_final_reward(outcome.spans) == 0.5
    assert outcome.spans[0].start_time == 7.0


async def test_no_reward_is_success_without_a_span(threads: ThreadPoolExecutor) -> None:
    assert await run(lambda task: None, threads) == Outcome("succeeded")


async def test_a_wrong_reward_is_a_failure_of_its_own_kind(threads: ThreadPoolExecutor) -> None:
    outcome = await run(lambda task: "good", threads)
    assert (outcome.status, outcome.failure.kind, outcome.spans) == ("failed", "reward", [])


# whose fault


def caused(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        raise outer from inner
    except type(outer) as error:
        return error


class OwnConnectError(Exception):
    pass


CONNECTION = openai.APIConnectionError(request=REQUEST)


@pytest.mark.parametrize("error", [
    CONNECTION, openai.APITimeoutError(request=REQUEST), answer_error(openai.InternalServerError, 500),
    answer_error(openai.InternalServerError, 503), httpx.ConnectError("refused"), httpx.ReadTimeout("slow"),
    httpx.RemoteProtocolError("cut"), caused(RuntimeError("my tool"), CONNECTION),
    caused(ValueError("outer"), caused(KeyError("middle"), answer_error(openai.InternalServerError, 502))),
    httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503, request=REQUEST)),
], ids=lambda error: f"{type(error).__name__}-{error}"[:40])  # fmt: skip
def test_a_service_that_is_down_is_the_infrastructure(error: BaseException) -> None:
    assert classify(error) == "infrastructure"


@pytest.mark.parametrize("error", [
    answer_error(openai.BadRequestError, 400), answer_error(openai.AuthenticationError, 401),
    answer_error(openai.NotFoundError, 404), answer_error(openai.RateLimitError, 429), ValueError("no"), TimeoutError("mine"),
    KeyError("x"), OwnConnectError("not of a client library"),
    caused(RuntimeError("outer"), answer_error(openai.BadRequestError, 400)), caused(RuntimeError("outer"), ValueError("inner")),
    httpx.HTTPStatusError("404", request=REQUEST, response=httpx.Response(404, request=REQUEST)),
], ids=lambda error: f"{type(error).__name__}-{error}"[:40])  # fmt: skip
def test_what_the_agent_did_wrong_is_the_agent(error: BaseException) -> None:
    assert classify(error) == "agent"


def test_a_wrong_reward_is_found_below_another_error() -> None:
    assert classify(caused(RuntimeError("outer"), RewardError("nan"))) == "reward"


def test_a_connection_error_in_a_task_group_is_the_infrastructure() -> None:
    assert classify(ExceptionGroup("unhandled errors in a TaskGroup", [CONNECTION])) == "infrastructure"


def test_a_message_is_one_line_with_the_type() -> None:
    assert describe(ValueError("first\n  second")).error == "ValueError: first second"


async def test_the_trace_shows_the_agent_and_none_of_raylight(threads: ThreadPoolExecutor) -> None:
    def deep_in_the_agent() -> None:
        raise KeyError("tool")

    async def asynchronous(task: int) -> float:
        deep_in_the_agent()
        return 1.0

    def synchronous(task: int) -> float:
        deep_in_the_agent()
        return 1.0

    for agent in (asynchronous, synchronous):
        failure = (await run(agent, threads)).failure
        assert failure.kind == "agent"
        assert "deep_in_the_agent" in failure.trace
        assert failure.trace.rstrip().endswith("KeyError: 'tool'")
        assert OUR_FRAMES[0] not in failure.trace


# time


async def test_an_agent_that_takes_too_long_times_out(threads: ThreadPoolExecutor) -> None:
    cleaned = asyncio.Event()

    async def endless(task: int) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return 1.0

    outcome = await run(endless, threads, timeout=0.02)
    assert (outcome.status, outcome.failure.kind) == ("timeout", "timeout")
    assert "0.02 s" in outcome.failure.error
    assert cleaned.is_set()


async def test_a_blocking_agent_that_takes_too_long_times_out(threads: ThreadPoolExecutor) -> None:
    leave = threading.Event()
    try:
        outcome = await run(lambda task: leave.wait(5), threads, timeout=0.02)
    finally:
        leave.set()
    assert outcome.status == "timeout"


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_timeout_of_the_agents_own_is_the_agents_failure(threads: ThreadPoolExecutor, asynchronous: bool) -> None:
    async def impatient(task: int) -> float:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        return 1.0

    def blunt(task: int) -> float:
        raise TimeoutError("my own tool")

    outcome = await run(impatient if asynchronous else blunt, threads)
    assert (outcome.status, outcome.failure.kind) == ("failed", "agent")


async def test_no_limit_is_possible(threads: ThreadPoolExecutor) -> None:
    assert (await run(lambda task: 1.0, threads, timeout=None)).status == "succeeded"


# whatever the agent does


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [
    asyncio.CancelledError("of the agent's own"), StopIteration(), ExceptionGroup("two", [ValueError(), KeyError()]), Unprintable(),
    SystemExit(3),
], ids=lambda error: type(error).__name__)  # fmt: skip
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_whatever_an_agent_raises_becomes_an_outcome(error: BaseException, asynchronous: bool) -> None:
    """In a loop and threads of its own, which some of these would end."""

    async def asynchronous_agent(task: int) -> float:
        raise error

    def synchronous_agent(task: int) -> float:
        raise error

    threads = ThreadPoolExecutor(1)

    async def attempt() -> Outcome | None:
        agent = rollout(asynchronous_agent if asynchronous else synchronous_agent)
        async with within(2):
            return await execute(agent, make_rollout(timeout=None), {}, "secret", threads, lambda: 7.0)

    outcome = None
    with contextlib.suppress(BaseException):
        outcome = asyncio.run(attempt())
    assert outcome is not None
    assert outcome.status == "failed"


async def test_cancelling_the_attempt_is_no_outcome_and_reaches_the_agent(threads: ThreadPoolExecutor) -> None:
    inside, cleaned = asyncio.Event(), asyncio.Event()

    async def endless(task: int) -> float:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return 1.0

    running = asyncio.create_task(run(endless, threads))
    await inside.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned.is_set()


# what the agent is given


async def test_an_asynchronous_agent_runs_on_the_loop_and_a_synchronous_one_in_a_thread(threads: ThreadPoolExecutor) -> None:
    places = []

    async def asynchronous(task: int) -> float:
        places.append(threading.current_thread())
        return float(task)

    def synchronous(task: int) -> float:
        places.append(threading.current_thread())
        return float(task)

    assert find_final_reward((await run(asynchronous, threads)).spans) == 3.0
    assert find_final_reward((await run(synchronous, threads)).spans) == 3.0
    assert places[0] is threading.current_thread()
    assert places[1] is not threading.current_thread()


async def test_the_agents_model_is_scoped_to_its_attempt_and_other_resources_are_as_they_were(threads: ThreadPoolExecutor) -> None:
    given: dict[str, Any] = {}

    def agent(task: int, llm: LLM, judge: LLM, table: dict) -> None:
        given.update(llm=llm, judge=judge, table=table)

    judge, table = LLM(endpoint="http://judge/v1", model="j", api_key="mine"), {"a": 1}
    await run(agent, threads, llm=LLM(endpoint="http://engine", model="policy", traced=True), judge=judge, table=table)
    assert given["llm"].endpoint == "http://engine/rollout/ro-1/attempt/at-1/v1"
    assert key_opens(given["llm"].api_key, "secret", "ro-1", "at-1")
    assert given["judge"] == judge
    assert given["table"] is table
