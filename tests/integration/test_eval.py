"""`raylight eval` and early stopping, in fresh processes with real Ray, engines and learners."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import BIN, Cluster
from run_output import metric_rows

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions

ADDER = "raylight.quickstart.agent:adder"
LOCAL = {**os.environ, "RAY_ADDRESS": "local"}

AGENTS = '''
import raylight as rl
from raylight.quickstart.additions import question


async def ask(task, llm):
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question(task)}],
        max_tokens=8,
        **llm.sampling_parameters,
    )
    return reply.choices[0].message.content or ""


@rl.rollout
async def graded(task, llm):
    """Return two rewards; every fourth task fails."""
    text = await ask(task, llm)
    if task["number"] % 4 == 3:
        raise ValueError("no tool")
    return {"right": float(text.strip() == str(task["a"] + task["b"])), "short": 1.0 / max(len(text), 1)}


@rl.rollout
async def silent(task, llm):
    await ask(task, llm)
'''

STOPS_EARLY = """
import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

train, val = additions(0)
algorithm = rl.GRPO(
    model=STARTER_MODEL, n_steps=20, tasks_per_step=2, group_size=2, lr=1e-6, val_every=1,
    best="val/response_tokens", best_mode="min", min_delta=100.0, patience=2,
)
rl.Trainer(algorithm=algorithm, n_runners=1, output_dir="run").fit(adder, train, val_dataset=val[:4])
"""


def evaluate(
    *args: str, env: dict[str, str] = LOCAL, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "raylight"), "eval", *args]
    return subprocess.run(
        command, env={**env, "COLUMNS": "140"}, capture_output=True, text=True, timeout=240, cwd=cwd
    )


def digest(folder: str | Path) -> str:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with 32 numbered validation tasks."""
    path = tmp_path_factory.mktemp("data") / "val.jsonl"
    path.write_text(
        "".join(json.dumps(task | {"number": i}) + "\n" for i, task in enumerate(additions(0)[1][:32]))
    )
    return path


@pytest.mark.slow
def test_the_starter_model_is_scored(data: Path, tmp_path: Path, no_processes_left: None) -> None:
    before = digest(STARTER_MODEL)
    done = evaluate(
        ADDER, "--model", STARTER_MODEL, "--data", str(data), "--samples", "4", "--output-dir", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for part in ("95% interval", "pass@4: ", "32 tasks, 128 rollouts, 0 failed", "eval.jsonl"):
        assert part in done.stdout

    figures = json.loads((tmp_path / "eval.json").read_text())
    reward = figures["rewards"]["reward"]
    low, high = reward["interval_95"]
    assert 0.3 < reward["mean"] < 0.7  # the starter model answers about half of the tasks correctly
    assert low < reward["mean"] < high
    assert figures["pass_at"]["1"] == pytest.approx(reward["mean"])
    assert figures["pass_at"]["1"] < figures["pass_at"]["2"] < figures["pass_at"]["4"]
    assert (figures["calls"], figures["failed"], figures["notes"]) == (128, 0, [])
    assert figures["config"]["model"] == STARTER_MODEL

    lines = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(line["task_index"], line["sample"]) for line in lines] == [
        (i, j) for i in range(32) for j in range(4)
    ]
    for line in lines:
        right = line["text"].strip() == str(line["task"]["a"] + line["task"]["b"])
        assert (line["reward"], line["rewards"], line["calls"]) == (
            float(right),
            {"primary": float(right)},
            1,
        )
    assert sum(line["reward"] for line in lines) / 128 == pytest.approx(reward["mean"])
    assert sum(line["tokens"] for line in lines) == figures["tokens"]
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert digest(STARTER_MODEL) == before


def _actors(cluster: Cluster) -> dict[str, str]:
    """The class of each actor by its id, also of those that have ended."""
    import ray
    from ray.util.state import list_actors

    with ray.init(address=cluster.address, log_to_driver=False):
        return {actor.actor_id: actor.class_name for actor in list_actors(limit=1000)}


@pytest.mark.slow
def test_evaluation_starts_no_learner(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """A user's agent has two rewards and failures, and passes the temperature on."""
    (tmp_path / "my_agents.py").write_text(AGENTS)
    args = (
        "my_agents:graded",
        "--model",
        STARTER_MODEL,
        "--data",
        str(data),
        "--temperature",
        "0",
        "--samples",
        "2",
    )
    before = _actors(cluster)
    done = evaluate(*args, "--limit", "8", "--output-dir", "out", env=cluster.env(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert (figures["primary"], set(figures["rewards"])) == ("right", {"reward", "short"})
    assert (figures["failed"], figures["rewards"]["reward"]["rollouts"]) == (4, 16)  # failures count as 0
    assert figures["rewards"]["short"]["rollouts"] == 12
    assert list(figures["failures"]) == ["ValueError: no tool"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "eval.jsonl").read_text().splitlines()]
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        assert first["text"] == second["text"]  # temperature 0 reached the engine
    started = {name for actor, name in _actors(cluster).items() if actor not in before}
    assert {"RunnerActor", "CoordinatorActor"} <= started
    assert not {name for name in started if "earner" in name}
    cluster.assert_clean(allowed=("SERVE", "haproxy"))


@pytest.mark.slow
def test_an_adapter_changes_what_is_sampled(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(STARTER_MODEL), settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    args = (ADDER, "--model", STARTER_MODEL, "--data", str(data), "--lora-adapter", str(tmp_path / "adapter"))
    done = evaluate(*args, "--limit", "8", "--output-dir", str(tmp_path / "out"), env=cluster.env())
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert figures["rewards"]["reward"]["mean"] < 0.2  # noise of this size ruins the model
    assert figures["lora_adapter"] == str(tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"agent": "nowhere:agent"}, 1, "ConfigError: agent='nowhere:agent': cannot import nowhere"),
        ({"--model": "/no/such/model"}, 1, "ModelNotFoundError: there is no model folder"),
        ({"--set": "learner.n=2"}, 1, "there is no section 'learner'"),
        ({"agent": "raylight.quickstart.agent:addr"}, 1, "it has: adder"),
        ({"--data": "/no/such/file.jsonl"}, 1, "DatasetError: there is no file /no/such/file.jsonl"),
        ({"--data": os.devnull}, 1, "DatasetError"),
        ({"--lora-adapter": "/no/such"}, 1, "ModelNotFoundError: there is no adapter folder"),
        ({"--set": "engine.replica=2"}, 1, "no setting 'replica'"),
        ({"--samples": "0"}, 2, "--samples"),
    ],
)
def test_bad_arguments_end_with_one_message(
    change: dict[str, str], code: int, message: str, data: Path, tmp_path: Path
) -> None:
    given = {"--model": STARTER_MODEL, "--data": str(data)} | change
    agent = given.pop("agent", ADDER)
    done = evaluate(
        agent, *(part for pair in given.items() for part in pair), "--output-dir", str(tmp_path / "out")
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_agent_without_a_reward_is_an_error(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agents.py").write_text(AGENTS)
    args = (
        "my_agents:silent",
        "--model",
        STARTER_MODEL,
        "--data",
        str(data),
        "--limit",
        "2",
        "--output-dir",
        "out",
    )
    done = evaluate(*args, env=cluster.env(), cwd=tmp_path)
    assert done.returncode == 1
    assert "RolloutsFailedError: none of 2 rollouts was scored: the agent returns None" in " ".join(
        done.stderr.split()
    )
    assert "Traceback" not in done.stderr
    assert len((tmp_path / "out" / "eval.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "out" / "eval.json").exists()


@pytest.mark.slow
def test_early_stopping_ends_training_and_keeps_the_best(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STOPS_EARLY)
    done = subprocess.run(
        [sys.executable, "train.py"],
        env=cluster.env(),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "patience" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        summary["steps"] == 2
    )  # of 20: the evaluations after steps 1 and 2 do not exceed the initial reward by 100
    rows = metric_rows(tmp_path / "run")
    assert all("val/response_tokens" in row for row in rows)
    best = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    assert {"metric": best["metric"], "step": best["step"], "value": best["value"]} == summary["best"]
    assert best["value"] == min(row["val/response_tokens"] for row in rows)
    assert (tmp_path / "run" / "checkpoint" / "config.json").exists()

    # the best checkpoint is a complete model, which can be scored in place without changing the run
    kept = digest(tmp_path / "run" / "best")
    args = (ADDER, "--model", "run/best", "--data", str(data), "--limit", "4", "--output-dir", "run")
    scored = evaluate(*args, env=cluster.env(), cwd=tmp_path)
    assert scored.returncode == 0, scored.stdout + scored.stderr
    assert digest(tmp_path / "run" / "best") == kept
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_a_benchmark_is_scored_and_compared(tmp_path: Path) -> None:
    rows = Path(__file__).parents[1] / "unit" / "benchmarks" / "samples" / "gsm8k.jsonl"
    run = str(tmp_path / "run")
    model = ["--model", str(STARTER_MODEL), "--max-tokens", "8"]
    ended = evaluate("gsm8k", *model, "--data", str(rows), "--limit", "2", "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    assert "0.845  Llama-3.1-8B-Instruct (8 examples)" in ended.stdout
    figures = json.loads((tmp_path / "run/eval.json").read_text())
    assert (figures["agent"], figures["failed"], figures["calls"]) == ("gsm8k", 0, 2)
    assert figures["config"]["sampling"] == {"temperature": 0.0, "max_tokens": 8}
    compared = evaluate("--compare", run, run)
    assert "+0.0000 to +0.0000" in compared.stdout, compared.stderr
