"""A task of two turns in which the model must use a tool's answer, and a model that can do it now and then.

The user asks for a sum; the model's answer is the number of an item, which a tool looks up. The tool answers
with the item's price and its shipping, and the model must say what these come to. Prices are made up for
every task, so that nothing but the tool's answer tells the price, and a wrong number gets the price of
another item. Both answers have to be right for the reward.
"""

import functools
import random
from pathlib import Path

from openai import AsyncOpenAI

import raylight as rl

TEACHING_STEPS, TEACHING_BATCH, TEACHING_RATE = 240, 64, 2e-3
CARELESS_FROM = 185
"""The step from which the teacher's second answers are careless, as its first ones always are."""
REMINDERS = 16
"""Of a batch, so many first turns are shown too: they are known already, and are not to be forgotten."""
NEVER_CARELESS = 0.4
"""Share of answers about which even a careless teacher (`build_quickstart_model.demonstrate`) is right."""


def quotes(seed: int, count: int) -> list[dict[str, int]]:
    """Tasks; all numbers have two digits, and so has every item's."""
    made = random.Random(seed)
    return [
        {
            "a": made.randint(10, 49),
            "b": made.randint(10, 49),
            "shipping": made.randint(10, 99),
            "catalogue": made.getrandbits(32),
        }
        for _ in range(count)
    ]


def price(task: dict[str, int], item: str) -> int:
    """What the tool finds under an item's number; any text is the number of some item."""
    return random.Random(f"{task['catalogue']} {item}").randint(10, 99)


def conversation(task: dict[str, int], item: str | None = None) -> list[dict[str, str]]:
    """The messages up to the model's first answer, or with that answer up to its second."""
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
    """1 for the price of the right item with shipping."""
    return float(total == str(price(task, str(task["a"] + task["b"])) + task["shipping"]))


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://unset", api_key="unset")


@rl.rollout
async def buyer(task: dict[str, int], llm: rl.LLM) -> float:
    """Ask for the item, look it up, and ask for the total in the same conversation."""
    chat = client().with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    item = await chat.create(model=llm.model, messages=conversation(task), temperature=1.0, max_tokens=8)  # type: ignore[arg-type]
    messages = conversation(task, item.choices[0].message.content or "")
    total = await chat.create(model=llm.model, messages=messages, temperature=1.0, max_tokens=8)  # type: ignore[arg-type]
    return score(task, total.choices[0].message.content or "")


def teach_buyer(folder: Path) -> None:
    """Write the quickstart's model to a folder, after showing it second turns for half a minute.

    It only ever saw first ones. As in `scripts/build_quickstart_model.py` a careless teacher leaves it right
    some of the time only.
    """
    import torch
    from build_quickstart_model import log_probs
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


def _careless(teacher: random.Random, answer: int) -> int:
    from build_quickstart_model import demonstrate

    return answer if teacher.random() < NEVER_CARELESS else demonstrate(teacher, answer, careless=True)
