"""Time per step of TRL's GRPOTrainer on the quickstart's model and task, without an agent.

    python tests/benchmarks/trl_grpo.py [--steps 25]        (needs `pip install trl`)

TRL samples in its own process. Prints the seconds per step of 128 rollouts, after the warm-up, as JSON.
"""

import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from harness import make_parser
from loop_runs import WARM_UP
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question


class Clock(TrainerCallback):
    """Callback that notes the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.ends.append(time.perf_counter())


def train(
    model: str, rows: list[dict[str, Any]], reward: Callable[..., list[float]], **settings: Any
) -> None:
    """Train with TRL, and print the mean seconds per step.

    Args:
        rows: the tasks, each with a `prompt`.
        settings: of `GRPOConfig`, those in which the benchmarks differ.
    """
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            beta=0.0,
            temperature=1.0,
            seed=0,
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False} | settings,
        )
        GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        ).train()
    ends = clock.ends[WARM_UP - 1 :]
    print(json.dumps({"step": (ends[-1] - ends[0]) / (len(ends) - 1)}))


def train_chat(
    model: str,
    n_tasks: int,
    question: Callable[[int], str],
    reward_of: Callable[[str], float],
    **settings: Any,
) -> None:
    """Train with TRL on the tasks of `loop_runs.chat_agent`."""

    def reward(completions: list, **rest: object) -> list[float]:
        return [reward_of(text[0]["content"]) for text in completions]

    rows = [{"prompt": [{"role": "user", "content": question(i)}]} for i in range(n_tasks)]
    train(model, rows, reward, **settings)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=25)
    steps = parser.parse_args().steps
    tasks, _ = additions(0)

    def reward(completions: list, index: list[int], **rest: object) -> list[float]:
        return [
            float(is_right(tasks[i], text[0]["content"])) for i, text in zip(index, completions, strict=True)
        ]

    train(
        STARTER_MODEL,
        [
            {"prompt": [{"role": "user", "content": question(task)}], "index": i}
            for i, task in enumerate(tasks)
        ],
        reward,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=8,
        max_steps=steps,
        learning_rate=2e-4,
    )


if __name__ == "__main__":
    main()
