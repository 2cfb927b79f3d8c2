"""GRPO by TRL's GRPOTrainer, which samples and updates in this process: single-turn prompts, and no agent."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylight._utils.files import atomic_files
from raylight.algorithms.base import Algorithm
from raylight.algorithms.baseline import as_list
from raylight.errors import ConfigError, DatasetError, RewardError
from raylight.experience.settings.advantages import GRPOAdvantage
from raylight.experience.settings.losses import VanillaLoss
from raylight.learner.model.local_device import select_device
from raylight.tasks.task_set import TaskSampler
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.algorithms.minigrpo import MiniGRPO

Metrics = dict[str, float]
STEP_TIME = "time/step_s"
METRIC_NAMES = {
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "completions/mean_length": "train/response_tokens",
    "loss": "learner/loss",
    "grad_norm": "learner/grad_norm",
    "kl": "learner/kl",
    "learning_rate": "learner/lr",
    "frac_reward_zero_std": "train/share_without_signal",
    "step_time": STEP_TIME,
}
"""TRL's name of a metric -> raylight's."""


class TrlGRPO(Algorithm):
    """GRPO of an adapter by TRL's GRPOTrainer, in this process.

    Args:
        settings: settings with `backend="trl"`.
    """

    serves_model = True

    def __init__(self, settings: MiniGRPO) -> None:
        self._settings = settings
        self._report_step: Callable[[int, Metrics], object]
        self._columns: defaultdict[str, list[float]] = defaultdict(list)
        """Metrics of the optimizer steps of a step, and of an evaluation after it."""
        self._val_rewards: defaultdict[int, list[float]] = defaultdict(list)
        """Rewards of an evaluation by the number of their task."""
        self._step = 0
        self._stopped = False

    def total_steps(self, n_train: int) -> int:
        return self._settings.steps(n_train)

    def resolved(self) -> JsonObject:
        return self._settings.arguments()

    async def run(self, train_dataset: object = None, val_dataset: object = None) -> None:
        """Train in a thread for the planned number of steps; a cancelled run ends after TRL's current step.

        Raises:
            DatasetError: there are no training tasks.
            ConfigError: TRL is not installed.
            RewardError: `reward_of` returned something other than a finite number.
        """
        tasks, val_tasks = as_list(train_dataset, "train_dataset"), as_list(val_dataset, "val_dataset")
        if not tasks:
            raise DatasetError("train_dataset is missing; pass a list of tasks")
        if importlib.util.find_spec("trl") is None:
            raise ConfigError(
                "backend='trl' needs TRL, which is not installed: pip install 'raylight[trl]', or use "
                "backend='raylight'"
            )
        context, loop = self.get_run_context(), asyncio.get_running_loop()
        context.note(
            "backend='trl': TRL samples prompt_of(task) and scores with reward_of; the agent is not called"
        )
        self._report_step = lambda step, row: loop.call_soon_threadsafe(context.step, step, row)
        folder = context.model_path(self._settings.model)
        try:
            await asyncio.to_thread(self._train, folder, context.checkpoint, tasks, val_tasks)
        finally:
            self._stopped = True

    def _train(self, path: str, checkpoint: Path, tasks: list[object], val_tasks: list[object]) -> None:
        """Train, and save the adapter."""
        settings = self._settings
        trainer = self._build_trainer(path, checkpoint, tasks, val_tasks)
        if val_tasks and settings.val_before_train:
            trainer.evaluate()
        total = settings.steps(len(tasks))
        if total:
            trainer.train()
        every = settings.val_every
        if val_tasks and total and not self._stopped and every is not None and (not every or total % every):
            trainer.evaluate()
        self._flush()
        save_adapter(trainer.model, checkpoint)

    def _build_trainer(self, path: str, checkpoint: Path, tasks: list[Any], val_tasks: list[Any]) -> Any:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOTrainer

        from raylight.learner.model.adapter import peft_config

        device = select_device(self._settings.device)
        half = self._settings.dtype == "bfloat16" or (
            self._settings.dtype == "auto" and device.type == "cuda"
        )
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="bfloat16" if half else "float32", attn_implementation="sdpa"
        )
        arguments = self._arguments(checkpoint, device.type, len(tasks), bool(val_tasks))
        return GRPOTrainer(
            model=model,
            reward_funcs=self._reward(tasks, val_tasks),
            args=arguments,
            train_dataset=self._dataset(tasks, 0).select(self._order(len(tasks))),
            eval_dataset=self._dataset(val_tasks, len(tasks)) if val_tasks else None,
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            peft_config=peft_config(self._settings.lora, "CAUSAL_LM", model),
            callbacks=[self._callback(checkpoint)],
        )

    def _arguments(self, checkpoint: Path, device: str, n_train: int, validates: bool) -> Any:
        from trl import GRPOConfig

        settings = self._settings
        assert isinstance(settings.loss, VanillaLoss)
        assert isinstance(settings.advantage, GRPOAdvantage)
        rollouts = settings.group_size * settings.tasks_per_step
        max_rows = max(1, settings.row_budget // settings.max_model_len)
        rows = max(size for size in range(1, min(max_rows, rollouts) + 1) if rollouts % size == 0)
        return GRPOConfig(
            output_dir=str(checkpoint),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=rollouts // rows,
            num_generations=settings.group_size,
            max_completion_length=settings.max_new_tokens,
            max_steps=settings.steps(n_train) * settings.ppo_epochs,
            shuffle_dataset=False,
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.grad_clip,
            beta=settings.kl_coef,
            num_iterations=settings.ppo_epochs,
            epsilon=settings.loss.clip_ratio_low,
            epsilon_high=settings.loss.clip_ratio_high,
            scale_rewards="group" if settings.advantage.norm_adv_by_std else "none",
            temperature=1.0,
            top_k=0,
            gradient_checkpointing=settings.gradient_checkpointing,
            bf16=False,
            fp16=False,
            use_cpu=device == "cpu",
            seed=settings.seed or 0,
            logging_steps=1,
            logging_first_step=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            eval_strategy="steps" if validates and settings.val_every else "no",
            eval_steps=(settings.val_every or 0) * settings.ppo_epochs or None,
            num_generations_eval=settings.val_samples,
            per_device_eval_batch_size=settings.val_samples * max_rows,
        )

    def _order(self, n_train: int) -> list[int]:
        """Return the indices of the tasks of all steps, in the order of raylight's own loop.

        TRL's order lacks the tasks of a pass that do not fill a step.
        """
        settings = self._settings
        sampler = TaskSampler(range(n_train), settings.seed or 0)
        return [sampler.draw(i).task for i in range(settings.steps(n_train) * settings.tasks_per_step)]

    def _dataset(self, tasks: list[object], first: int) -> Any:
        """Return a dataset of prompts and task indices, because a dataset cannot hold every type of task."""
        from datasets import Dataset

        prompt_of = self._settings.trl_prompt_of
        assert prompt_of is not None, "checked with the settings"
        return Dataset.from_list(
            [{"prompt": prompt_of(task), "number": first + i} for i, task in enumerate(tasks)]
        )

    def _reward(self, tasks: list[object], val_tasks: list[object]) -> Callable[..., list[float | None]]:
        reward_of = self._settings.trl_reward_of
        assert reward_of is not None, "checked with the settings"
        both = tasks + val_tasks

        def reward(completions: list[Any], number: list[int], **rest: object) -> list[float | None]:
            rewards: list[float | None] = []
            for i, completion in zip(number, completions, strict=True):
                text = completion if isinstance(completion, str) else completion[0]["content"]
                value = _finite(reward_of(both[i], text))
                rewards.append(value)
                if i >= len(tasks):
                    self._val_rewards[i].append(value)
            return rewards

        return reward

    def _callback(self, checkpoint: Path) -> Any:
        from transformers import TrainerCallback

        run, passes = self, self._settings.ppo_epochs
        every = (self._settings.save_every or 0) * passes

        class LogCallback(TrainerCallback):
            def on_log(
                self, args: object, state: Any, control: object, logs: Any = None, **rest: object
            ) -> None:
                run._collect_logs(state.global_step, logs or {})

            def on_step_end(
                self, args: object, state: Any, control: Any, model: object = None, **rest: object
            ) -> None:
                control.should_training_stop = control.should_training_stop or run._stopped
                if every and state.global_step % every == 0:
                    save_adapter(model, checkpoint / f"step-{state.global_step // passes}")

        return LogCallback()

    def _collect_logs(self, optimizer_step: int, logs: JsonObject) -> None:
        """Collect TRL's log entries of a step, and report the row of the step before."""
        step = -(-optimizer_step // self._settings.ppo_epochs)
        if step != self._step:
            self._flush()
        self._step = step
        for theirs, ours in METRIC_NAMES.items():
            if theirs in logs:
                self._columns[ours].append(float(logs[theirs]))
        if "eval_reward" in logs:
            self._columns["val/reward"] = [self._take_val_reward()]

    def _take_val_reward(self) -> float:
        """Return the mean reward of an evaluation. TRL fills its last batch with tasks that it repeats, and
        counts it as much as the others."""
        samples = self._settings.val_samples
        rewards = [value for values in self._val_rewards.values() for value in values[:samples]]
        self._val_rewards.clear()
        return math.fsum(rewards) / len(rewards)

    def _flush(self) -> None:
        means = {name: sum(values) / len(values) for name, values in self._columns.items()}
        if times := self._columns.get(STEP_TIME):
            means[STEP_TIME] = sum(times)
        if means:
            self._report_step(self._step, means)
        self._columns.clear()


def _finite(reward: object) -> float:
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise RewardError(f"reward_of returned {reward!r:.80}; it must return a finite number")


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of a model in peft's format, each file atomically."""
    with atomic_files(folder) as partial:
        model.save_pretrained(partial)
