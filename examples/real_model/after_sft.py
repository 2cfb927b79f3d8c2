"""Teach SmolLM2-135M-Instruct a task by demonstrations, and then by rewards.

    python examples/real_model/after_sft.py reverse
    python examples/real_model/after_sft.py calculator

`reverse` writes words in the opposite order. `calculator` multiplies by calling a tool. The model can do
neither; a short SFT shows it how, and GRPO makes it do so reliably.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import TRAINING as WORDS
from pretrained import make_pretrained

import raylight as rl
from raylight.quickstart import TOOL_MODEL

LENGTHS = (3, 5)
FACTORS = (11, 99)
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task that the model learns.

    Attributes:
        make: returns a random example, given a generator.
        show: returns the messages of its solution.
        agent: tries it and returns a reward.
        demonstrations: number of them in the SFT.
    """

    make: Callable[[random.Random], dict[str, Any]]
    show: Callable[[dict[str, Any]], list[Message]]
    agent: Any
    demonstrations: int


def ask_to_reverse(task: dict[str, Any]) -> Message:
    return {"role": "user", "content": f"Reverse the order of these words: {' '.join(task['words'])}"}


@rl.rollout
async def reverse_words(task: dict[str, Any], llm: rl.LLM) -> float:
    """Reverse words; the reward is the likeness to the right answer, from 0 to 1."""
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=[ask_to_reverse(task)], temperature=1.0, max_tokens=32
    )
    words = (reply.choices[0].message.content or "").split()
    return difflib.SequenceMatcher(None, words, task["words"][::-1]).ratio()


def ask_to_multiply(task: dict[str, Any]) -> Message:
    return {"role": "user", "content": f"What is {task['a']} times {task['b']}?"}


@rl.rollout
async def multiplier(task: dict[str, Any], llm: rl.LLM) -> float:
    """Multiply with a tool, called in up to two turns; the reward is 1 for the product in the answer."""
    messages: list[Any] = [ask_to_multiply(task)]
    for _ in range(2):
        reply = await llm.client().chat.completions.create(
            model=llm.model, messages=messages, tools=[MULTIPLY], temperature=1.0, max_tokens=48
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return float(str(task["a"] * task["b"]) in re.findall(r"\d+", message.content or ""))
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)}
            for call in message.tool_calls
        ]
    return 0.0


def multiply(arguments: str) -> str:
    """Return the product of a call's arguments, or what is wrong with them."""
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) * int(values["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}: {error}"


def show_multiplication(task: dict[str, Any]) -> list[Message]:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "multiply", "arguments": json.dumps({"a": task["a"], "b": task["b"]})},
    }
    product = str(task["a"] * task["b"])
    return [
        ask_to_multiply(task),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": product},
        {"role": "assistant", "content": f"{task['a']} times {task['b']} is {product}."},
    ]


TASKS = {
    "reverse": Task(
        lambda source: {"words": source.sample(WORDS, source.randint(*LENGTHS))},
        lambda task: [ask_to_reverse(task), {"role": "assistant", "content": " ".join(task["words"][::-1])}],
        reverse_words,
        demonstrations=128,
    ),
    "calculator": Task(
        lambda source: {"a": source.randint(*FACTORS), "b": source.randint(*FACTORS)},
        show_multiplication,
        multiplier,
        demonstrations=64,
    ),
}


def with_tools(model: Path, folder: Path) -> Path:
    """Copy a model, with a chat template that shows tools; return the new folder."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    shutil.copy(Path(TOOL_MODEL) / "chat_template.jinja", folder)
    return folder


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach SmolLM2 a task by demonstrations, then by rewards.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", type=Path, help="folder of another chat model; SmolLM2 if not given")
    parser.add_argument("--demonstrations", type=int, help="learned once, 16 a step")
    parser.add_argument("--steps", type=int, default=8, help="of GRPO, each with 32 rollouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/after_sft"))
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    task, source = TASKS[args.task], random.Random(args.seed)
    model = args.model or make_pretrained("smollm2", Path("outputs/smollm2"))
    model = with_tools(model, args.output_dir / "model")
    examples = [task.make(source) for _ in range(args.demonstrations or task.demonstrations)]
    tools = {"tools": [MULTIPLY]} if args.task == "calculator" else {}
    learner = {"num_threads": os.cpu_count()}
    rl.Trainer(
        algorithm=rl.SFT(
            model=str(model),
            data=[{"messages": task.show(example)} | tools for example in examples],
            lr=1e-4,
            batch_size=16,
            n_epochs=1,
        ),
        learner=learner,
        output_dir=args.output_dir / "sft",
        seed=args.seed,
    ).fit()
    rl.Trainer(
        algorithm=rl.GRPO(
            model=str(args.output_dir / "sft" / "checkpoint"),
            n_steps=args.steps,
            tasks_per_step=4,
            group_size=8,
            lr=1e-5,
            val_every=args.steps,
        ),
        n_runners=1,
        engine={"max_model_len": 384},
        learner=learner,
        output_dir=args.output_dir / "grpo",
        seed=args.seed,
    ).fit(
        task.agent,
        [task.make(source) for _ in range(4 * args.steps)],
        val_dataset=[task.make(source) for _ in range(32)],
    )


def main() -> None:
    try:
        train(parse())
    except rl.RaylightError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
