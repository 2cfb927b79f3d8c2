"""Self-play on Ray: older versions of the policy are served, drawn, rated, kept and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import Cluster
from run_output import metric_rows

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question
from raylight.trainer.output.run_records import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected(Path(__file__).parent):  # the runners import the agent
        yield


async def ask(llm: rl.LLM, text: str) -> str:
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": text}], max_tokens=6, temperature=1.0
    )
    return reply.choices[0].message.content or ""


@rl.rollout
async def race(task: dict, llm: rl.LLM, opponent: rl.LLM) -> float:
    """Both answer the sum; the one that is right alone wins."""
    own, other = await ask(llm, question(task)), await ask(opponent, question(task))
    return (1 + is_right(task, own) - is_right(task, other)) / 2


def fit(steps: int, folder: Path, resume: bool = False) -> list[dict]:
    train, val = additions(0)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(
            model=str(STARTER_MODEL),
            opponents=rl.algorithms.SelfPlay(every=1, pool=2, draw="uniform"),
            group_size=4,
            tasks_per_step=4,
            n_steps=steps,
            val_every=steps,
            lr=5e-3,
        ),
        learner={"lora": {"rank": 4}},
        n_runners=1,
        output_dir=folder,
        progress=False,
        loggers=["jsonl"],
        checkpoint={"every": 1},
    )
    trainer.fit(race, train, val[:4], resume=resume)
    return metric_rows(folder)


def test_older_versions_are_opponents_also_in_a_resumed_run(tmp_path: Path) -> None:
    fit(2, tmp_path)
    rows = [row for row in fit(4, tmp_path, resume=True) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["opponents/newest_step"] for row in rows] == [0, 1, 2, 3]
    assert [row["opponents/pool"] for row in rows] == [1, 2, 2, 2]
    assert rows[-1]["ledger/unaccounted"] == 0
    assert rows[-1]["ledger/model/opponent/trained"] == 0 < rows[-1]["ledger/model/opponent/sampled"]
    assert rows[-1]["ledger/model/policy/trained"] == rows[-1]["ledger/trained"] > 0
    met: set[tuple[int, int]] = set()
    for item in read_rollouts(tmp_path):
        own, other = item.generations
        assert own.model == "policy"
        parts = item.rollout.rollout_id.split("-")
        step = int(parts[2]) // 4 + 1 if item.rollout.mode == "train" else None
        if step is None:
            assert other.model == "policy@opponent-0"
            assert {*other.weight_versions.tolist()} == {0}
            continue
        rival = item.rollout.metadata["opponent"]
        assert other.model.partition("@opponent-")[2].split("-")[0] == str(rival)
        assert {*own.weight_versions.tolist()} == {step - 1}
        assert {*other.weight_versions.tolist()} == {rival}
        met.add((step, rival))
    assert {rival for step, rival in met if step == 1} == {0}
    assert all(rival < step for step, rival in met)
    assert {3} & {rival for step, rival in met if step == 4} or {2} & {r for s, r in met if s == 4}
    assert (tmp_path / "opponents" / "step-3" / "adapter_model.safetensors").is_file()
