"""Asynchronous training with real learners, engines and runners."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from run_output import metric_rows

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

STEPS, GROUPS, SAMPLES, STALENESS = 6, 4, 4, 2


pytestmark = pytest.mark.usefixtures("connected")


@rl.rollout
async def waiting_adder(task: dict, llm: rl.LLM) -> float:
    """The quickstart's agent with a tool that takes some time."""
    await asyncio.sleep((task["a"] + task["b"]) % 10 / 10)
    return await adder(task, llm)


@pytest.mark.slow
@pytest.mark.parametrize("stale", ["wait", "drop", "mask"])
def test_rollouts_updates_and_publications_overlap(stale: str, tmp_path: Path) -> None:
    train, val = additions(0)
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=SAMPLES,
        tasks_per_step=GROUPS,
        n_steps=STEPS,
        val_every=3,
        max_staleness=STALENESS,
        **({} if stale == "wait" else {"stale": stale}),
    )
    trainer = rl.Trainer(algorithm=algorithm, n_runners=1, output_dir=tmp_path, progress=False)
    summary = trainer.fit(waiting_adder, train, val[:4])
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "val/reward" in row] == [0, 3, 6]
    ages = [row["async/staleness_max"] for row in rows[1:]]
    assert 1 <= max(ages) <= STALENESS
    assert max(row["async/publish_lag"] for row in rows[1:]) <= 1
    assert all(row["ledger/unaccounted"] == 0 for row in rows)
    tokens = summary["tokens"]
    assert tokens["generated"] >= tokens["trained"] > 0
    parts = ("trained", "masked", "dropped", "failed", "open")
    assert tokens["generated"] == sum(tokens[part] for part in parts)
    assert (tokens["dropped"] > 0) <= (stale == "drop")
