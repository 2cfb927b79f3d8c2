"""The policy and its frozen reference on verl's FSDP2 engine: log-probs, one update, export, save. One object per rank."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from raylight.config import LearnerConfig
from raylight.errors import MismatchError, NonFiniteGradientError
from raylight.learner import verl_api as verl
from raylight.learner.advantages import rollout_advantages
from raylight.learner.batch import TrainBatch
from raylight.learner.rows import Row, rows_of, share_of_rank, to_tensordict
from raylight.learner.settings import PolicySettings

MAX_NON_FINITE = 3
"""Gradients in a row that may be skipped for not being finite."""


class Policy:
    """The trained model of one rank; every method is a collective that all ranks call alike.

    Args:
        model_path: folder of a Hugging Face model.
        total_steps: updates of the whole run, for the learning-rate schedule.
    """

    def __init__(self, model_path: str, config: LearnerConfig, settings: PolicySettings, total_steps: int) -> None:
        self._config = config
        self._settings = settings
        self._engine = _build_engine(model_path, config, settings, total_steps, forward_only=False)
        self._reference = (
            _build_engine(model_path, config, settings, total_steps, forward_only=True) if settings.kl_coef > 0 else None
        )
        self._loss = functools.partial(verl.ppo_loss, config=_actor_config(settings, config))
        self._non_finite = 0
        self.version = 0

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update with a batch that is the same on all ranks; returns metrics, the same on all ranks.

        Raises:
            MismatchError: the engine's log-probs of the current version differ from this model's.
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        advantages = rollout_advantages(batch, self._settings)
        rows = rows_of(batch, advantages)
        rank, ranks = self._engine.get_data_parallel_rank(), self._engine.get_data_parallel_size()
        dealt = _deal(rows, self._settings.mini_batches)
        mine = [share_of_rank(chosen, rank, ranks) for chosen in dealt]
        everything = [row for share in mine for row in share]
        self._add_logprobs(everything)  # before the first step: all mini-batches are compared with the same old policy
        metrics = self._mismatch(everything)
        metrics |= _mean_of([self._train(share, len(chosen)) for share, chosen in zip(mine, dealt, strict=True)])
        metrics["learner/lr"] = float(self._engine.lr_scheduler_step())
        self.version += 1
        return metrics | {"learner/advantage_abs_mean": float(np.mean(np.abs(advantages)))}

    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of `ids[1:]`, each given those before it; `ids` are the same on all ranks."""
        tokens, length = torch.tensor(ids), len(ids) - 1
        row = Row(
            prompt=tokens[:1], response=tokens[1:], mask=torch.ones(length, dtype=torch.long), engine_logprobs=torch.zeros(length),
            versions=torch.zeros(length, dtype=torch.long), advantage=0.0, temperature=1.0,
        )  # fmt: skip
        return self._infer(self._engine, [row])[0].tolist()

    def export(self) -> dict[str, np.ndarray] | None:
        """The whole model as float32 arrays by Hugging Face name, on rank 0; None elsewhere."""
        params, _ = self._engine.get_per_tensor_param()
        arrays = {}
        for name, tensor in params:
            if torch.distributed.get_rank() == 0:
                arrays[name] = tensor.detach().to("cpu", torch.float32).numpy().copy()
        return arrays or None

    def save(self, folder: str) -> None:
        """Write the model in Hugging Face format to `folder`, complete or not at all."""
        partial = f"{folder}.partial"
        self._engine.save_checkpoint(partial, global_step=self.version)
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(os.path.join(partial, "huggingface"), folder)
            shutil.rmtree(partial)
        torch.distributed.barrier()

    def _add_logprobs(self, rows: list[Row]) -> None:
        """The policy's log-probs before the update, and the reference's where there is one."""
        for engine, name in ((self._engine, "old_logprobs"), (self._reference, "ref_logprobs")):
            if engine is None:
                continue
            for row, logprobs in zip(rows, self._infer(engine, rows), strict=True):
                setattr(row, name, logprobs)

    def _infer(self, engine: Any, rows: list[Row]) -> list[torch.Tensor]:
        """Log-probs of each row's response."""
        data = to_tensordict(rows, self._config, global_rows=len(rows), entropy=False)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]["log_probs"]
        return [logprobs.float().cpu() for logprobs in verl.response_from_nested(output, data["response_mask"]).unbind()]

    def _mismatch(self, rows: list[Row]) -> dict[str, float]:
        """How far the engine's log-probs are from this model's, over tokens of the current version, on all ranks."""
        diffs = [row.mismatch(self.version) for row in rows]
        gathered = torch.cat(diffs) if diffs else torch.zeros(0)
        worst = torch.tensor(float(gathered.max()) if len(gathered) else 0.0)
        sums = torch.tensor([float(gathered.sum()), float(len(gathered))])
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(sums)
        limit = self._settings.max_logprob_mismatch
        if not sums[1]:
            raise MismatchError(
                f"no token of the batch was sampled from weight version {self.version}: the engine did not take the new weights"
            )
        if not float(worst) <= limit:  # also when it is NaN
            raise MismatchError(
                f"log-probs of engine and learner differ by up to {float(worst):.2g} for weight version {self.version}, more than "
                f"{limit:g}. Either the agent samples with top_p, top_k or a grammar (JSON schema, required tools), or the engine "
                "lacks these weights; max_logprob_mismatch sets the limit"
            )
        return {"mismatch/logprob_abs_max": float(worst), "mismatch/logprob_abs_mean": float(sums[0] / sums[1].clamp(min=1))}

    def _train(self, rows: list[Row], global_rows: int) -> dict[str, float]:
        """Gradient and optimizer step over this rank's rows of one mini-batch."""
        data = to_tensordict(rows, self._config, global_rows=global_rows, entropy=True)
        with self._engine.train_mode():
            output = self._engine.train_batch(data, loss_function=self._loss)
        metrics = _plain(output["metrics"])
        norm = metrics["grad_norm"]
        self._non_finite = 0 if math.isfinite(norm) else self._non_finite + 1
        if self._non_finite >= MAX_NON_FINITE:
            raise NonFiniteGradientError(
                f"the gradient was not finite {MAX_NON_FINITE} times in a row; lower lr or grad_clip, or train in fp32"
            )
        return _named(metrics) | {"learner/skipped_steps": float(not math.isfinite(norm))}


def _build_engine(model_path: str, config: LearnerConfig, settings: PolicySettings, total_steps: int, forward_only: bool) -> Any:
    dtype = config.dtype
    engine = verl.EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=verl.HFModelConfig(
            path=model_path,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
        ),
        engine_config=verl.FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            use_torch_compile=False,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            forward_only=forward_only,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=config.max_tokens_per_micro_batch,
            infer_max_token_len_per_gpu=config.max_tokens_per_micro_batch,
        ),
        optimizer_config=_optimizer(settings, total_steps),
        checkpoint_config=verl.CheckpointConfig(save_contents=["hf_model"], load_contents=["hf_model"]),
    )
    engine.initialize()
    return engine


def _optimizer(settings: PolicySettings, total_steps: int) -> Any:
    return verl.FSDPOptimizerConfig(
        lr=settings.lr, lr_warmup_steps=settings.lr_warmup_steps, total_training_steps=max(total_steps, 1),
        weight_decay=settings.weight_decay, clip_grad=settings.grad_clip,
    )  # fmt: skip


def _actor_config(settings: PolicySettings, config: LearnerConfig) -> Any:
    return verl.ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False,
        clip_ratio=settings.clip_ratio_low, clip_ratio_low=settings.clip_ratio_low, clip_ratio_high=settings.clip_ratio_high,
        entropy_coeff=settings.entropy_coef, use_kl_loss=settings.kl_coef > 0, kl_loss_coef=settings.kl_coef,
        kl_loss_type=settings.kl_type, loss_agg_mode=settings.loss_agg_mode,
        policy_loss=verl.PolicyLossConfig(loss_mode=settings.loss_mode), optim=_optimizer(settings, 1),
    )  # fmt: skip


def _deal(rows: list[Row], parts: int) -> list[list[Row]]:
    """Mini-batches of nearly equal size; fewer when there are fewer rows."""
    parts = min(parts, len(rows))
    return [rows[i::parts] for i in range(parts)]


NAMES = {
    "grad_norm": "learner/grad_norm", "actor/pg_loss": "learner/pg_loss", "actor/entropy_loss": "learner/entropy",
    "actor/ppo_kl": "learner/ppo_kl", "actor/pg_clipfrac": "learner/clip_fraction", "kl_loss": "learner/kl",
}  # fmt: skip


def _named(metrics: dict[str, float]) -> dict[str, float]:
    """verl's metrics under our names; the others are not shown."""
    return {ours: metrics[theirs] for theirs, ours in NAMES.items() if theirs in metrics}


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics as numbers: what a Metric says of itself, the mean of a list, averaged over ranks."""
    local = {}
    for name, value in metrics.items():
        if isinstance(value, verl.Metric):
            value = value.aggregate()
        elif isinstance(value, Iterable) and not isinstance(value, torch.Tensor):
            value = float(np.mean([float(v) for v in value]))
        local[name] = float(value)
    names = sorted(local)
    values = torch.tensor([local[name] for name in names], dtype=torch.float64)
    torch.distributed.all_reduce(values)
    return dict(zip(names, (values / torch.distributed.get_world_size()).tolist(), strict=True))


def _mean_of(parts: list[dict[str, float]]) -> dict[str, float]:
    names = {name for part in parts for name in part}
    return {name: float(np.mean([part[name] for part in parts if name in part])) for name in sorted(names)}
