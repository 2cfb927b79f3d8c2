"""MiniGRPO by TRL's GRPOTrainer, which samples and updates in this process and runs no agent: single-turn prompts only."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import Callable
from typing import Any

from raylight.algorithms.base import RunContext
from raylight.algorithms.minigrpo.settings import MiniSettings
from raylight.errors import ConfigError, RewardError
from raylight.store.client import StoreClient

Metrics = dict[str, float]
NAMES = {
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "completions/mean_length": "train/response_tokens",
    "loss": "learner/loss",
    "grad_norm": "learner/grad_norm",
    "kl": "learner/kl",
    "learning_rate": "learner/lr",
    "frac_reward_zero_std": "train/share_without_signal",
    "step_time": "time/step_s",
    "eval_reward": "val/reward",
}
"""TRL's name of a metric -> ours."""


def check_installed() -> None:
    """Raise ConfigError if TRL is not there."""
    if importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "backend='trl' needs TRL, which is not installed: pip install 'raylight[trl]', or take backend='own'"
        )


async def train(
    settings: MiniSettings, store: StoreClient, side: RunContext, tasks: list[Any], val_tasks: list[Any]
) -> None:
    """Train in a thread of its own; a run that is cancelled ends after the step that TRL is at.

    Raises:
        ConfigError: TRL is not installed.
        RewardError: `reward_of` gave something that is no number.
    """
    check_installed()
    side.note("backend='trl': TRL samples prompt_of(task) and scores with reward_of; the agent is not called")
    loop = asyncio.get_running_loop()
    run = TrlRun(settings, side, lambda step, metrics: loop.call_soon_threadsafe(side.step, step, metrics))
    try:
        await asyncio.to_thread(run.train, side.model_path(settings.model), tasks, val_tasks)
    finally:
        run.stopped = True


class TrlRun:
    """One run of TRL's trainer.

    Attributes:
        stopped: set to have it end after the current step.
    """

    def __init__(self, settings: MiniSettings, side: RunContext, tell: Callable[[int, Metrics], Any]) -> None:
        self._settings = settings
        self._side = side
        self._tell = tell
        self._row: Metrics = {}
        self._step = 0
        self.stopped = False

    def train(self, path: str, tasks: list[Any], val_tasks: list[Any]) -> None:
        from raylight.algorithms.minigrpo.tuner import save_adapter

        settings = self._settings
        trainer = self._trainer(path, tasks, val_tasks)
        if val_tasks and settings.val_before_train:
            trainer.evaluate()
        total = settings.steps(len(tasks))
        if total:
            trainer.train()
        if (
            val_tasks
            and total
            and not self.stopped
            and (not settings.val_every or total % settings.val_every)
        ):
            trainer.evaluate()
        self._flush()
        save_adapter(trainer.model, self._side.checkpoint)

    def _trainer(self, path: str, tasks: list[Any], val_tasks: list[Any]) -> Any:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOTrainer

        from raylight.algorithms.minigrpo.setup import device_of, dtype_of
        from raylight.algorithms.minigrpo.tuner import peft_config

        device = device_of(self._settings)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype_of(self._settings, device), attn_implementation="sdpa"
        )
        arguments = self._arguments(device.type, len(tasks), bool(val_tasks))
        return GRPOTrainer(
            model=model,
            reward_funcs=self._reward(tasks + val_tasks),
            args=arguments,
            train_dataset=self._dataset(tasks, 0),
            eval_dataset=self._dataset(val_tasks, len(tasks)) if val_tasks else None,
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            peft_config=peft_config(self._settings.lora),
            callbacks=[self._callback()],
        )

    def _arguments(self, device: str, n_train: int, validates: bool) -> Any:
        from trl import GRPOConfig

        settings = self._settings
        rollouts = settings.group_size * settings.tasks_per_step
        most = max(1, settings.row_budget // settings.max_model_len)
        rows = max(size for size in range(1, min(most, rollouts) + 1) if rollouts % size == 0)
        return GRPOConfig(
            output_dir=str(self._side.checkpoint),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=rollouts // rows,
            num_generations=settings.group_size,
            max_completion_length=settings.max_new_tokens,
            max_steps=settings.steps(n_train),
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.grad_clip,
            beta=settings.kl_coef,
            num_iterations=settings.passes,
            epsilon=settings.clip_ratio_low,
            epsilon_high=settings.clip_ratio_high,
            scale_rewards="group" if settings.norm_adv_by_std else "none",
            temperature=1.0,
            top_k=0,
            gradient_checkpointing=settings.gradient_checkpointing,
            bf16=False,
            fp16=False,
            use_cpu=device == "cpu",
            seed=settings.seed,
            logging_steps=1,
            logging_first_step=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            eval_strategy="steps" if validates and settings.val_every else "no",
            eval_steps=settings.val_every or None,
            num_generations_eval=settings.val_samples,
            per_device_eval_batch_size=settings.val_samples * most,
        )

    def _dataset(self, tasks: list[Any], first: int) -> Any:
        """Prompts with the numbers of their tasks, which need not be what a dataset can hold."""
        from datasets import Dataset

        prompt_of = self._settings.prompt_of
        assert prompt_of is not None
        return Dataset.from_list(
            [{"prompt": prompt_of(task), "number": first + i} for i, task in enumerate(tasks)]
        )

    def _reward(self, tasks: list[Any]) -> Callable[..., list[float | None]]:
        reward_of = self._settings.reward_of
        assert reward_of is not None

        def reward(completions: list[Any], number: list[int], **rest: Any) -> list[float | None]:
            texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
            return [_number(reward_of(tasks[i], text)) for i, text in zip(number, texts, strict=True)]

        return reward

    def _callback(self) -> Any:
        from transformers import TrainerCallback

        from raylight.algorithms.minigrpo.tuner import save_adapter

        run, every = self, self._settings.save_every

        class Follow(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
                run.hear(state.global_step, logs or {})

            def on_step_end(
                self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
            ) -> None:
                control.should_training_stop = control.should_training_stop or run.stopped
                if every and state.global_step % every == 0:
                    save_adapter(model, run._side.checkpoint / f"step-{state.global_step}")

        return Follow()

    def hear(self, step: int, logs: dict[str, Any]) -> None:
        """Gather what TRL logs of a step, in several pieces, into one row."""
        if step != self._step:
            self._flush()
        self._step = step
        self._row |= {ours: float(logs[name]) for name, ours in NAMES.items() if name in logs}

    def _flush(self) -> None:
        if self._row:
            self._tell(self._step, self._row)
        self._row = {}


def _number(reward: Any) -> float:
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise RewardError(f"reward_of gave {reward!r:.80}, which is no finite number")
