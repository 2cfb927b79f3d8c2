"""MiniGRPO with TRL's GRPOTrainer: single-turn prompts, in process, without Ray."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

import raylight as rl
from raylight.algorithms.trl_grpo import TrlGRPO
from raylight.config import LoraConfig
from raylight.errors import RewardError
from raylight.learner.model.adapter import peft_config
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question

pytest.importorskip("trl", reason="the extra raylight[trl] is not installed")
NAMES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""Inputs of TRL's loss: tokens, and masks without the padding."""


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


def numbered(n: int) -> list[dict]:
    """Return tasks, each with its number."""
    return [{**task, "number": i} for i, task in enumerate(additions(0)[0][:n])]


SMALL = {"max_new_tokens": 4, "max_tokens_per_micro_batch": 64 * 4, "tasks_per_step": 4, "group_size": 2}


@pytest.mark.parametrize(
    ("n_tasks", "length", "counts"),
    [
        (3, {"n_steps": 2}, {4, 6}),  # fewer tasks than a step has
        (8, {"n_epochs": 1, "n_steps": None, "ppo_epochs": 2}, {2}),
        (6, {"n_epochs": 2, "n_steps": None}, {4}),
    ],
)
async def test_every_task_is_taken(tmp_path: Path, n_tasks: int, length: dict, counts: set[int]) -> None:
    seen: Counter[int] = Counter()

    def count(task: dict, text: str) -> float:
        seen[task["number"]] += 1
        return letters(text)

    trl = algorithm(tmp_path, **SMALL | length, reward_of=count, save_every=1)
    await trl.run(numbered(n_tasks))
    context: Any = trl.get_run_context()
    steps = trl.total_steps(n_tasks)
    assert set(seen.values()) == counts
    assert len(seen) == n_tasks
    assert seen.total() == steps * 4 * 2
    assert [step for step, _ in context.rows] == list(range(1, steps + 1))
    assert all({"train/reward", "learner/loss", "time/step_s"} <= row.keys() for _, row in context.rows)
    assert {path.name for path in context.checkpoint.glob("step-*")} == {
        f"step-{i + 1}" for i in range(steps)
    }


async def test_the_validation_reward_is_the_mean_over_the_tasks(tmp_path: Path) -> None:
    train, val = numbered(4), numbered(5)
    lengths = {"n_steps": 4, "ppo_epochs": 2, "val_every": 2, "val_samples": 2}
    trl = algorithm(tmp_path, **SMALL | lengths, reward_of=lambda task, text: float(task["number"] == 4))
    await trl.run(train, val)
    context: Any = trl.get_run_context()
    found = {step: row["val/reward"] for step, row in context.rows if "val/reward" in row}
    assert found == {0: 0.2, 2: 0.2, 4: 0.2}


async def test_a_reward_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    trl = algorithm(tmp_path, n_steps=1, tasks_per_step=1, reward_of=lambda task, text: float("nan"))
    with pytest.raises(RewardError, match="returned nan; it must return a finite number"):
        await trl.run(additions(0)[0][:8])


def letters(text: str) -> float:
    """Return a reward in which answers differ."""
    return float(sum(map(ord, text)) % 7)


def plain_gradient(model: Any, rows: list[tuple[list[int], list[int], float]]) -> tuple[float, float]:
    """Return the loss of a step of GRPO and the norm of its gradient, by plain torch, a row at a time.

    Args:
        rows: prompt, answer and advantage of each.
    """
    tokens = sum(len(answer) for _, answer, _ in rows)
    model.zero_grad()
    for prompt, answer, advantage in rows:
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
        (-advantage * logprobs.sum() / tokens).backward()  # at a ratio of 1 it has the gradient of the ratio
    squares = [param.grad.square().sum() for param in model.parameters() if param.grad is not None]
    loss = -sum(advantage * len(answer) for _, answer, advantage in rows) / tokens
    return loss, float(torch.stack(squares).sum().sqrt())


async def test_a_step_is_that_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOTrainer

    batches: list[dict[str, torch.Tensor]] = []
    adapters: list[dict[str, torch.Tensor]] = []
    compute = GRPOTrainer._compute_loss

    def recorded(trainer: Any, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        adapters.append({name: value.clone() for name, value in get_peft_model_state_dict(model).items()})
        batches.append({name: inputs[name].clone() for name in NAMES})
        return compute(trainer, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", recorded)
    lora = LoraConfig(rank=4, alpha=8, dropout=0.0, target_modules=["q_proj", "v_proj"])
    sizes = {"n_steps": 1, "tasks_per_step": 2, "group_size": 4, "max_tokens_per_micro_batch": 2 * 64}
    trl = algorithm(tmp_path, **sizes, lora=lora, reward_of=lambda task, text: letters(text), grad_clip=1e6)
    await trl.run(additions(0)[0][:2])
    assert len(batches) == 4, "micro-batches of two rows"

    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    texts: dict[tuple[int, ...], list[tuple[list[int], float]]] = {}
    for batch in batches:
        for prompt, seen, answer, kept in zip(*(batch[name] for name in NAMES), strict=True):
            ids = answer[kept.bool()].tolist()
            reward = letters(tokenizer.decode(ids, skip_special_tokens=True))
            texts.setdefault(tuple(prompt[seen.bool()].tolist()), []).append((ids, reward))
    assert [len(group) for group in texts.values()] == [4, 4]
    rows = []
    for key, group in texts.items():
        rewards = torch.tensor([reward for _, reward in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        rows += [(list(key), ids, float(a)) for (ids, _), a in zip(group, advantages, strict=True)]
    base = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    model = get_peft_model(base, peft_config(lora, "CAUSAL_LM", base))
    set_peft_model_state_dict(model, adapters[0])
    loss, norm = plain_gradient(model, rows)
    ((_, metrics),) = [row for row in trl.get_run_context().rows if row[0] == 1]
    assert norm > 0
    assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics["learner/loss"] == pytest.approx(loss, abs=1e-4)  # TRL rounds what it logs
