"""Hooks around one attempt: when they are called, what they are given, and what a failing one costs."""

import asyncio
from typing import Any

import pytest
from unit_helpers import Endless, Odd, Unprintable, run_attempt, within

from raylight.agent.emit import emit_reward
from raylight.agent.hooks import Hook
from raylight.traces.context import current_trace
from raylight.traces.reward_spans import find_final_reward


class Diary(Hook):
    """Notes every event; `fail` names the one that raises."""

    def __init__(self, fail: str = "", strict: bool = False, error: BaseException | None = None) -> None:
        self.notes: list[str] = []
        self.given: dict[str, Any] = {}
        self.strict = strict
        self._fail, self._error = fail, error or ValueError("of the hook")

    async def on_rollout_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self._note("rollout_start", agent=agent, runner=runner, tracer=tracer, rollout=rollout)

    def on_trace_start(self, *, rollout: Any) -> None:  # type: ignore[override]
        self._note("trace_start", traced=current_trace())

    async def on_trace_end(self, *, rollout: Any, spans: Any) -> None:  # type: ignore[override]
        self._note("trace_end", spans=spans)

    def on_rollout_end(self, *, spans: Any) -> None:  # type: ignore[override]
        self._note("rollout_end", last=spans)

    def _note(self, event: str, **given: Any) -> None:
        self.notes.append(event)
        self.given |= given
        if event == self._fail:
            raise self._error


ALL = ["rollout_start", "trace_start", "trace_end", "rollout_end"]


async def test_hooks_surround_the_agent_and_get_what_there_is() -> None:
    diary = Diary()

    def agent(task: int) -> float:
        diary.notes.append("agent")
        return 0.5

    outcome, spans = await run_attempt(agent, hooks=[diary])
    assert outcome.status == "succeeded"
    assert diary.notes == ["rollout_start", "trace_start", "agent", "trace_end", "rollout_end"]
    assert diary.given["runner"] == "the runner"
    assert diary.given["rollout"].rollout_id == "ro-1"
    assert diary.given["traced"].attempt_id == "at-1"
    # what the agent returned comes after, so that it outweighs a reward set here
    assert diary.given["spans"] == []
    assert diary.given["last"] == spans
    assert len(spans) == 1


def raises(task: int) -> float:
    raise ValueError("of the agent")


async def hangs(task: int) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("agent", "status"), [(raises, "failed"), (hangs, "timeout"), (lambda task: "wrong", "failed")]
)
async def test_the_hooks_of_the_end_come_after_any_end(agent: Any, status: str) -> None:
    diary = Diary()
    outcome, _ = await run_attempt(agent, hooks=[diary], timeout=0.05)
    assert (outcome.status, diary.notes) == (status, ALL)


async def test_the_hooks_of_the_end_come_also_when_the_attempt_is_cancelled() -> None:
    """They close what a hook opened for the attempt, such as a sandbox."""
    diary, agent = Diary(), Endless()
    running = asyncio.create_task(run_attempt(agent.run, hooks=[diary]))
    async with within():
        await agent.inside.wait()
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled()
    assert diary.notes == ALL


@pytest.mark.parametrize("event", ALL)
@pytest.mark.parametrize(
    "error",
    [ValueError("of the hook"), Unprintable(), Odd(), asyncio.CancelledError(), SystemExit(3)],
    ids=repr,
)
async def test_a_hook_that_fails_and_is_not_strict_changes_nothing(event: str, error: BaseException) -> None:
    diary = Diary(event, error=error)
    outcome, spans = await run_attempt(lambda task: 0.5, hooks=[diary])
    assert (outcome.status, find_final_reward(spans), diary.notes) == ("succeeded", 0.5, ALL)


@pytest.mark.parametrize("event", ALL)
@pytest.mark.parametrize(
    "error", [ValueError("of the hook"), Unprintable(), Odd(), asyncio.CancelledError("\ud800")], ids=ascii
)
async def test_a_strict_hook_that_fails_fails_the_attempt(event: str, error: BaseException) -> None:
    called = []
    diary = Diary(event, strict=True, error=error)
    outcome, _ = await run_attempt(lambda task: called.append(task), hooks=[diary])
    assert (outcome.status, outcome.failure.kind) == ("failed", "hook")
    assert f"Diary.on_{event}: {type(error).__name__}" in outcome.failure.error
    assert outcome.failure.model_dump_json()
    if event in ("trace_end", "rollout_end"):
        assert (called, diary.notes) == ([3], ALL)
    else:
        assert (called, diary.notes[-2:]) == ([], ["trace_end", "rollout_end"])


async def test_an_agents_failure_is_told_before_that_of_a_strict_hook() -> None:
    outcome, _ = await run_attempt(raises, hooks=[Diary("trace_end", strict=True)])
    assert (outcome.failure.kind, outcome.failure.error) == ("agent", "ValueError: of the agent")


async def test_a_reward_set_at_the_end_of_the_rollout_counts() -> None:
    class Judge(Hook):
        async def on_rollout_end(self, *, spans: Any) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            emit_reward(find_final_reward(spans) * 10)

    outcome, spans = await run_attempt(lambda task: 0.5, hooks=[Judge()])
    assert (outcome.status, find_final_reward(spans)) == ("succeeded", 5.0)
