"""Two-turn task that needs a tool's answer, and a model that sometimes solves it.

The user asks for a sum; the model's answer is the number of an item, which a tool looks up. The tool returns
the item's price and its shipping, and the model must answer with the sum of these. Prices are random for
every task, so only the tool's answer contains the price, and a wrong number returns the price of another
item. The reward requires both answers to be correct.
"""

import random
from pathlib import Path
from typing import Any

import raylight as rl

TEACHING_STEPS, TEACHING_BATCH, TEACHING_RATE = 240, 64, 2e-3
CARELESS_FROM = 185
"""First step at which the teacher's second answers are careless; its first answers always are."""
REMINDERS = 16
"""First turns in each batch, so that the model does not forget them."""
NEVER_CARELESS, CARELESS_RIGHT = 0.4, 0.32
"""Fraction of answers that even a careless teacher gets right, and its accuracy in the others."""
ANSWER_TOKENS = 4
"""Three digits and the end of the turn."""
IGNORED = -100


def quotes(seed: int, count: int) -> list[dict[str, int]]:
    """Return tasks; all numbers, including numbers of items, have two digits."""
    generator = random.Random(seed)
    return [
        {
            "a": generator.randint(10, 49),
            "b": generator.randint(10, 49),
            "shipping": generator.randint(10, 99),
            "catalogue": generator.getrandbits(32),
        }
        for _ in range(count)
    ]


def price(task: dict[str, int], item: str) -> int:
    """Return the price of an item; any text is the number of some item."""
    return random.Random(f"{task['catalogue']} {item}").randint(10, 99)


def conversation(task: dict[str, int], item: str | None = None) -> list[dict[str, str]]:
    """Return the messages before the model's first answer, or, with that answer, before its second."""
    messages = [{"role": "user", "content": f"{task['a']}+{task['b']}="}]
    if item is not None:
        quote = {
            "role": "tool",
            "tool_call_id": "quote",
            "content": f"{price(task, item)}+{task['shipping']}=",
        }
        messages += [{"role": "assistant", "content": item}, quote]
    return messages


def score(task: dict[str, int], total: str) -> float:
    """Return 1 for the price of the correct item with shipping, else 0."""
    return float(total == str(price(task, str(task["a"] + task["b"])) + task["shipping"]))


@rl.rollout
async def buyer(task: dict[str, int], llm: rl.LLM) -> float:
    """Ask for the item, look it up, and ask for the total in the same conversation."""
    chat = llm.client().chat.completions
    item = await chat.create(model=llm.model, messages=conversation(task), temperature=1.0, max_tokens=8)  # type: ignore[arg-type]
    messages = conversation(task, item.choices[0].message.content or "")
    total = await chat.create(model=llm.model, messages=messages, temperature=1.0, max_tokens=8)  # type: ignore[arg-type]
    return score(task, total.choices[0].message.content or "")


def teach_buyer(folder: Path) -> None:
    """Train the quickstart's model on second turns for half a minute, and write it to a folder.

    The original model was trained on first turns only. As in `examples.starter_models`, a careless
    teacher leaves it right only some of the time.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from raylight.quickstart import STARTER_MODEL

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TEACHING_STEPS)
    teacher = random.Random(0)

    def prompts(chats: list[list[dict[str, str]]]) -> torch.Tensor:
        return torch.tensor(
            tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        )

    for step in range(TEACHING_STEPS):
        tasks = quotes(step, TEACHING_BATCH)
        items = [_careless(teacher, task["a"] + task["b"]) for task in tasks]
        totals = [price(task, str(item)) + task["shipping"] for task, item in zip(tasks, items, strict=True)]
        if step >= CARELESS_FROM:
            totals = [_careless(teacher, total) for total in totals]
        first = [conversation(task) for task in tasks[:REMINDERS]]
        second = [conversation(task, str(item)) for task, item in zip(tasks, items, strict=True)]
        lessons = [
            log_probs(model, tokenizer, prompts(first), items[:REMINDERS]),
            log_probs(model, tokenizer, prompts(second), totals),
        ]
        loss = -sum(logps.sum() for logps, _ in lessons) / sum(tokens for _, tokens in lessons)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def log_probs(model: Any, tokenizer: Any, prompts: Any, answers: list[int]) -> tuple[Any, Any]:
    """Return log-probs of the answers' tokens, shape (answers, ANSWER_TOKENS) with zeros as padding, and the
    token count."""
    import torch

    rows = [tokenizer.encode(f"{answer}<|im_end|>") for answer in answers]
    targets = torch.tensor([row + [IGNORED] * (ANSWER_TOKENS - len(row)) for row in rows])
    inputs = torch.cat([prompts, targets[:, :-1].clamp(min=0)], dim=1)
    logits = model(inputs, logits_to_keep=ANSWER_TOKENS, use_cache=False).logits.transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return -losses, (targets != IGNORED).sum()


def _careless(teacher: random.Random, answer: int) -> int:
    """Return the answer, or the answer with one of its last two digits wrong."""
    if teacher.random() < NEVER_CARELESS or teacher.random() < CARELESS_RIGHT:
        return answer
    digits = list(str(answer))
    place = teacher.choice((-1, -2))
    leading = len(digits) + place == 0  # never a leading zero
    digits[place] = teacher.choice([d for d in "0123456789"[leading:] if d != digits[place]])
    return int("".join(digits))
