"""Train a small model to add: offline, on a CPU, in a few minutes.

    python examples/quickstart.py

On a cluster:

    ray job submit --working-dir . -- python examples/quickstart.py --output-dir /shared/quickstart

The agent depends on raylight only through its `llm` argument, and can use any OpenAI client.
"""

import argparse
import random

import raylight as rl
from raylight.quickstart import STARTER_MODEL


@rl.rollout
async def adder(task: dict, llm: rl.LLM) -> float:
    """Ask for a + b; the reward is 1 for the right answer."""
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": f"{task['a']}+{task['b']}="}],
        max_tokens=8,
    )
    return 1.0 if reply.choices[0].message.content == str(task["a"] + task["b"]) else 0.0


def make_tasks() -> tuple[list[dict], list[dict]]:
    """Return training tasks and validation tasks."""
    tasks = [{"a": a, "b": b} for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(tasks)
    val = tasks[:128]
    held_out = {frozenset(task.values()) for task in val}  # training on b+a would reveal a+b
    return [task for task in tasks if frozenset(task.values()) not in held_out], val


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model to add.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--output-dir", default="outputs/quickstart")
    args = parser.parse_args()
    train, val = make_tasks()
    algorithm = rl.GRPO(
        model=STARTER_MODEL, n_steps=args.steps, lr=2e-4, kl_coef=1e-3, val_every=5, val_samples=2
    )
    rl.Trainer(algorithm=algorithm, n_runners=2, output_dir=args.output_dir).fit(
        adder, train, val_dataset=val
    )


if __name__ == "__main__":
    main()
