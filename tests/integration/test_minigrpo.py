"""MiniGRPO on a real Ray cluster: runners, durable store, HTTP, one process that samples and trains."""

import sqlite3
from pathlib import Path

import pytest
import torch
import yaml
from run_output import metric_rows

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question
from raylight.quickstart.agent import adder

pytestmark = pytest.mark.usefixtures("connected_on_one_thread")


def accuracy(model: torch.nn.Module) -> float:
    """Return the share of correct sampled answers to the validation tasks, by plain transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    tasks = additions(0)[1]
    chats = [[{"role": "user", "content": question(task)}] for task in tasks]
    ids = torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))
    output = model.generate(ids, do_sample=True, max_new_tokens=8)[:, ids.shape[1] :]  # type: ignore[operator]
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    return sum(is_right(task, text) for task, text in zip(tasks, texts, strict=True)) / len(tasks)


@pytest.mark.slow
def test_the_agent_learns_with_an_adapter(tmp_path: Path) -> None:
    """The reward rises from about 0.5 to at least 0.8 in 12 steps."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train, val = additions(0)
    algorithm = {
        "type": "raylight.MiniGRPO",
        "model": STARTER_MODEL,
        "lr": 2e-3,
        "n_steps": 12,
        "tasks_per_step": 16,
        "max_model_len": 64,
        "max_new_tokens": 8,
        "max_tokens_per_micro_batch": 2048,
        "max_concurrent": 128,
        "gradient_checkpointing": False,
        "kl_coef": 1e-3,
        "val_every": 6,
        "save_every": 5,
        "passes": 1,
    }
    trainer = rl.Trainer(algorithm=algorithm, n_runners=2, output_dir=tmp_path, progress=False)
    summary = trainer.fit(adder, train, val_dataset=val)

    assert summary["reward"] == "val/reward"
    assert summary["reward_before"] <= 0.65
    assert summary["reward_after"] >= 0.8
    assert summary["steps"] == 12
    assert summary["rollouts_lost"] == 0

    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(13))
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert [row["weights/version"] for row in learned] == list(range(1, len(learned) + 1))
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in learned)
    assert learned[-1]["learner/kl"] > 0
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["algorithm"]["lr"] == 2e-3
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")

    assert {path.name for path in (tmp_path / "state").iterdir()} == {"step-10", "step-12"}
    assert (tmp_path / "best" / "config.json").exists()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    assert accuracy(base) <= 0.65
    assert accuracy(PeftModel.from_pretrained(base, tmp_path / "checkpoint" / "adapter")) >= 0.75
    with sqlite3.connect(tmp_path / "store.db") as store:
        assert store.execute("select count(*) from rollouts").fetchone()[0] == 12 * 128 + 3 * 128


@rl.rollout
async def broken(task: dict, llm: rl.LLM) -> float:
    raise ValueError("the agent is broken")


@pytest.mark.slow
def test_a_broken_agent_ends_the_run_with_its_error(tmp_path: Path) -> None:
    algorithm = rl.MiniGRPO(model=STARTER_MODEL, n_steps=2, max_model_len=64, max_new_tokens=8)
    with pytest.raises(rl.RaylightError, match="the agent is broken"):
        rl.Trainer(algorithm=algorithm, output_dir=tmp_path, progress=False).fit(broken, [{"a": 10, "b": 10}])


@pytest.mark.slow
def test_a_device_with_too_little_memory_is_an_error(tmp_path: Path) -> None:
    algorithm = rl.MiniGRPO(model=STARTER_MODEL, n_steps=2, memory_limit_gb=0.001)
    with pytest.raises(rl.RaylightError, match="GB at the peak"):
        rl.Trainer(algorithm=algorithm, output_dir=tmp_path, progress=False).fit(adder, [{"a": 10, "b": 10}])
