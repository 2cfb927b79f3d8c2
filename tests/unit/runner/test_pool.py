"""Replacement of runners that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from unit_helpers import within

from raylight.config import RunnerConfig
from raylight.errors import PlacementError, RunnerLostError
from raylight.runner import pool as module
from raylight.runner.pool import RunnerPayload, RunnerPool

DIED = RayActorError(error_msg="The actor died unexpectedly before finishing this task")
BROKEN = RayActorError(error_msg="No module named 'agents'", actor_init_failed=True)


def lost_by(cause: Exception) -> RunnerLostError:
    error = RunnerLostError(f"the runners did not start: {cause}")
    error.__cause__ = cause
    return error


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """Outcomes of the starts that follow, in their order."""
    outcomes: list[Exception | None] = []

    class StartUp:
        def __init__(self, actors: Any, config: Any) -> None: ...

        async def wait(self) -> None:
            if outcome := outcomes.pop(0):
                raise outcome

    monkeypatch.setattr(module, "StartUp", StartUp)
    monkeypatch.setattr(module.ray, "kill", lambda actor: None)
    return outcomes


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RunnerPool:
    payload: Any = RunnerPayload(agent=None)  # type: ignore[arg-type]
    pool = RunnerPool("run", RunnerConfig(max_restarts=3), store=None, payload=payload)  # type: ignore[arg-type]

    def start() -> str:
        name = f"runner-{pool._started}"
        pool._started += 1
        pool._actors[name] = SimpleNamespace(name=name)
        return name

    monkeypatch.setattr(pool, "_start_actor", start)
    return pool


async def test_a_replacement_that_dies_with_its_node_is_replaced_too(
    pool: RunnerPool, starts: list[Exception | None], caplog: pytest.LogCaptureFixture
) -> None:
    starts += [lost_by(DIED), lost_by(DIED), None]
    async with within():
        assert await pool._replace("runner-0", "its node was lost") == "runner-2"
    assert set(pool._actors) == {"runner-2"}
    assert pool.lost == 2
    assert "the replacement of runner-0 died" in caplog.text


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([lost_by(DIED)] * 4, "died unexpectedly"),
        ([lost_by(BROKEN)], "No module named"),
        ([RunnerLostError("no progress")], "no progress"),
        ([PlacementError("no CPU")], "no CPU"),
    ],
    ids=["dies again and again", "cannot load the agent", "hangs", "finds no room"],
)
async def test_a_replacement_that_cannot_start_ends_the_run(
    outcomes: list[Exception], message: str, pool: RunnerPool, starts: list[Exception | None]
) -> None:
    starts += outcomes
    async with within():
        with pytest.raises(RunnerLostError, match=f"runner-0 ended .* could not be replaced: .*{message}"):
            await pool._replace("runner-0", "it died")
    assert not starts
