"""MiniGRPO with TRL's GRPOTrainer: single-turn prompts, in process, without Ray."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import raylight as rl
from raylight.algorithms.trl_grpo import TrlGRPO
from raylight.errors import RewardError
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question

pytest.importorskip("trl", reason="the extra raylight[trl] is not installed")


class RecordingContext:
    """Run context that records notes and steps."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.notes: list[str] = []

    def model_path(self, model: str) -> str:
        return model

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))


def chat_of(task: dict) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(task)}]


def score(task: dict, text: str) -> float:
    return float(is_right(task, text))


def algorithm(folder: Path, **given: Any) -> TrlGRPO:
    plain = {
        "backend": "trl",
        "model": STARTER_MODEL,
        "prompt_of": chat_of,
        "reward_of": score,
        "lr": 2e-3,
        "n_steps": 8,
        "tasks_per_step": 16,
        "max_model_len": 64,
        "max_new_tokens": 8,
        "max_tokens_per_micro_batch": 64 * 128,
        "device": "cpu",
        "gradient_checkpointing": False,
    }
    built = TrlGRPO(rl.MiniGRPO(**plain | given))
    built.set_run_context(RecordingContext(folder))  # type: ignore[arg-type]
    return built


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def test_trl_trains_the_adapter(tmp_path: Path) -> None:
    train, val = additions(0)
    trl = algorithm(tmp_path, val_every=4, save_every=4)
    await trl.run(train[:512], val)
    context: Any = trl.get_run_context()
    rows = dict(context.rows)
    assert list(rows) == list(range(9))
    assert [step for step, row in rows.items() if "val/reward" in row] == [0, 4, 8]
    assert rows[0]["val/reward"] <= 0.65
    assert rows[8]["val/reward"] >= rows[0]["val/reward"] + 0.15
    assert all(
        row["learner/grad_norm"] >= 0 and 0 <= row["train/reward"] <= 1 for step, row in rows.items() if step
    )
    assert any("the agent is not called" in note for note in context.notes)
    assert (context.checkpoint / "step-4" / "adapter_model.safetensors").exists()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(STARTER_MODEL), context.checkpoint
    )
    assert max(float(p.abs().max()) for name, p in loaded.named_parameters() if "lora_B" in name) > 1e-4


async def test_a_reward_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    trl = algorithm(tmp_path, n_steps=1, tasks_per_step=1, reward_of=lambda task, text: float("nan"))
    with pytest.raises(RewardError, match="returned nan; it must return a finite number"):
        await trl.run(additions(0)[0][:8])
