"""Runs with several models on Ray: adapters of one base, their checkpoints, ledger and resumed run."""

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


async def ask(llm: rl.LLM, model: str, text: str) -> str:
    reply = await llm.client().chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=6, temperature=1.0
    )
    assert reply.model == model
    return reply.choices[0].message.content or ""


@rl.rollout
async def both(task: dict, planner: rl.LLM, coder: rl.LLM, judge: rl.LLM) -> float:
    """Each model answers the sum; the coder is called through the planner's URL by its name."""
    first = await ask(planner, planner.model, question(task))
    second = await ask(planner, coder.model, question(task))
    await ask(judge, judge.model, question(task))
    return (is_right(task, first) + is_right(task, second)) / 2


def algorithm(steps: int) -> rl.GRPO:
    return rl.GRPO(
        model=str(STARTER_MODEL),
        models={
            "planner": {"lr": 5e-3},
            "coder": {"lr": 1e-3, "mini_batches": 2},
            "judge": {"trained": False},
        },
        group_size=4,
        tasks_per_step=4,
        n_steps=steps,
        val_every=1,
        lr=1e-3,
    )


def fit(steps: int, folder: Path, resume: bool | str = False) -> list[dict]:
    train, val = additions(0)
    trainer = rl.Trainer(
        algorithm=algorithm(steps),
        learner={"lora": {"rank": 4}},
        n_runners=1,
        output_dir=folder,
        progress=False,
        loggers=["jsonl"],
        checkpoint={"every": 1},
    )
    trainer.fit(both, train, val[:4], resume=resume)
    return metric_rows(folder)


def test_a_run_trains_serves_and_resumes_several_models(tmp_path: Path) -> None:
    fit(1, tmp_path)
    rows = fit(2, tmp_path, resume=True)
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == [1, 2]
    last = steps[-1]
    assert last["weights/version"] == 2
    assert last["model/planner/learner/lr"] == 5e-3
    assert last["model/coder/learner/lr"] == 1e-3
    assert last["model/judge/calls"] == last["model/planner/calls"] == 16
    assert last["train/other_models"] == 16
    assert last["ledger/unaccounted"] == 0
    trained = {name: last[f"ledger/model/{name}/trained"] for name in ("planner", "coder", "judge")}
    assert trained["judge"] == 0 < min(trained["planner"], trained["coder"])
    assert sum(trained.values()) == last["ledger/trained"]
    finished = [item for item in read_rollouts(tmp_path) if item.rollout.mode == "train"]
    calls = [call for item in finished for call in item.generations]
    for name in trained:
        own = [call for call in calls if call.model == name]
        assert sum(len(call.output_ids) for call in own) == last[f"ledger/model/{name}/sampled"]
        versions = {version for call in own for version in call.weight_versions.tolist()}
        assert versions == ({0} if name == "judge" else {0, 1})
    weights = {}
    for name in trained:
        folder = tmp_path / "checkpoint" / name
        assert (folder / "config.json").is_file()
        weights[name] = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
        assert (tmp_path / "best" / name / "adapter" / "adapter_config.json").is_file()
    assert len(set(weights.values())) == 3
    figures = rl.Trainer(n_runners=1, output_dir=tmp_path / "eval", progress=False).evaluate(
        both,
        additions(0)[1][:4],
        model=str(STARTER_MODEL),
        lora_adapter={name: str(tmp_path / "checkpoint" / name / "adapter") for name in trained},
    )
    assert figures["failed"] == 0
    assert sorted(figures["lora_adapter"]) == sorted(trained)


def test_an_asynchronous_run_pins_all_models_for_its_evaluations(tmp_path: Path) -> None:
    train, val = additions(0)
    trainer = rl.Trainer(
        algorithm=algorithm(4).model_copy(update={"max_staleness": 1}),
        engine={"replicas": 2},
        learner={"lora": {"rank": 4}},
        n_runners=1,
        output_dir=tmp_path,
        progress=False,
        loggers=["jsonl"],
    )
    trainer.fit(both, train, val[:4])
    finished = [item for item in read_rollouts(tmp_path) if item.rollout.mode == "val"]
    assert finished
    for item in finished:
        step = int(item.rollout.rollout_id.split("-")[2])
        names = [call.model for call in item.generations]
        assert names == [f"planner@step-{step}", f"coder@step-{step}", "judge"]
        sampled = [{*call.weight_versions.tolist()} for call in item.generations]
        assert sampled == [{step}, {step}, {0}]
