"""Time per step of TRL's GRPOTrainer on the quickstart's model and task, without an agent.

    python tests/benchmarks/trl_grpo.py [--steps 15]        (needs `pip install trl`)

TRL samples in its own process. Prints the median seconds per step of 128 rollouts.
"""

import argparse
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, is_right, question

ROLLOUTS, GROUP, RESPONSE_TOKENS = 128, 8, 8


class Clock(TrainerCallback):
    """Callback that measures the duration of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    train, _ = additions(0)
    rows = [
        {"prompt": [{"role": "user", "content": question(task)}], "index": i} for i, task in enumerate(train)
    ]

    def reward(completions: list, index: list[int], **rest: object) -> list[float]:
        return [
            float(is_right(train[i], text[0]["content"])) for i, text in zip(index, completions, strict=True)
        ]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROLLOUTS,
            num_generations=GROUP,
            max_completion_length=RESPONSE_TOKENS,
            max_steps=steps,
            learning_rate=1e-3,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            seed=0,
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=STARTER_MODEL,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        trainer.train()
    print(f"trl {statistics.median(clock.seconds[2:]):.4f}")


if __name__ == "__main__":
    main()
