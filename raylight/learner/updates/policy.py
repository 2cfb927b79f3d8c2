"""The policy of one rank on verl's FSDP2 engine, with its frozen reference model and its critic."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping

import torch

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import BatchShard, shard_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.losses import correction
from raylight.learner.losses.advantages import KlController, add_advantages
from raylight.learner.losses.distillation import Distiller
from raylight.learner.losses.metrics import all_reduce_metrics, mean_over_steps, rename_metrics
from raylight.learner.losses.policy_loss import PolicyLoss
from raylight.learner.model.fsdp import RaylightEngine
from raylight.learner.tokens.rows import (
    Minibatch,
    TrainRow,
    build_minibatches,
    build_rows,
    check_routes,
    record_row,
)
from raylight.learner.updates.critic import Critic
from raylight.learner.updates.trained_model import TrainedModel
from raylight.types import JsonObject


class Policy(TrainedModel):
    """The trained model of one rank, with its critic.

    Args:
        model_path: folder of a Hugging Face model.
        total_steps: updates of the whole run, for the learning-rate schedule.
        module: model in this process that is trained in place; None loads one.
        engine: an engine that other policies share; None builds one.
    """

    def __init__(
        self,
        model_path: str,
        config: LearnerConfig,
        settings: PolicySettings,
        total_steps: int,
        module: torch.nn.Module | None = None,
        engine: RaylightEngine | None = None,
    ) -> None:
        self.settings = settings
        warmup = settings.critic.warmup_steps if settings.critic else 0
        super().__init__(model_path, config, settings, max(total_steps - warmup, 1), module, engine)
        self.critic = Critic(model_path, config, settings.critic, total_steps) if settings.critic else None
        self._distiller = Distiller(settings, config) if settings.divergence else None
        self._kl = KlController(settings)
        self._has_dropout = config.lora is not None and config.lora.dropout > 0

    @property
    def engines(self) -> dict[str, RaylightEngine]:
        """The engines that are trained, by name: `policy` and, if there is one, `critic`."""
        return {"policy": self.engine} | ({} if self.critic is None else {"critic": self.critic.engine})

    def load_images(self, files: Mapping[str, bytes]) -> None:
        super().load_images(files)
        if self._distiller is not None:
            self._distiller.load_images(files)

    def progress(self) -> JsonObject:
        """Return the version, the KL coefficient, and the count of non-finite gradients."""
        return super().progress() | {"kl_coef": self._kl.adapted_coef}

    def restore_progress(self, progress: JsonObject) -> None:
        """Continue from the numbers that `progress` returned."""
        super().restore_progress(progress)
        self._kl.restore(progress["kl_coef"])

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the policy with a batch that every rank has as a whole; see `update_shard`."""
        ranks, rank = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        return self.update_shard(list(shard_batch(batch, self.settings, ranks))[rank])

    def update_shard(self, shard: BatchShard) -> dict[str, float]:
        """Update the policy with this rank's shard of a batch, and return metrics, equal on all ranks.

        Raises:
            MismatchError: the engine's log-probs of the current version differ from this model's.
            NonFiniteGradientError: the gradient was not finite several times in a row.
        """
        settings = self.settings
        self.load_images(shard.image_files)
        rows = build_rows(shard.rows, shard.outline.owners.tolist())
        minibatches = build_minibatches(rows, shard.minibatches)
        critic_minibatches = build_minibatches(rows, shard.critic_minibatches)
        own_rows = [row for minibatch in minibatches for row in minibatch.rows]
        if self.engine.replays_routes:
            check_routes(own_rows)
        critic_rows = [row for minibatch in critic_minibatches for row in minibatch.rows]
        trains = self.critic is None or not self.critic.warming_up
        # the training pass cannot supply old log-probs under dropout or during critic warm-up
        infers = settings.needs_old_logprobs or self._has_dropout or not trains
        self._infer_before_update(own_rows, infers)
        metrics: dict[str, float] = {}
        if infers:
            metrics |= correction.measure(own_rows, self.version, settings)
        metrics |= add_advantages(
            shard.outline, list(dict.fromkeys([*own_rows, *critic_rows])), settings, self._kl
        )
        if self.critic is not None:
            metrics |= self.critic.update(critic_minibatches)
        # after advantages and critic, for which tokens that the policy loss leaves out still count
        if settings.proximal == "loglinear":
            correction.set_proximal_fractions(own_rows, self.version)
        elif settings.correction_enabled:
            metrics |= correction.correct(own_rows, settings)
        if trains:
            keeps_all = settings.rollout_rs is None
            steps = [step for step in minibatches if keeps_all or correction.has_tokens(step.rows)]
            teachers = contextlib.nullcontext() if self._distiller is None else self._distiller.resident()
            stores = itertools.chain([not infers], itertools.repeat(False))  # later steps have other weights
            with self.engine.resident(), teachers:
                metrics |= mean_over_steps(list(map(self._step, steps * settings.ppo_epochs, stores)))
        # without a pass before, only the first mini-batch has log-probs from before the first step
        measured = own_rows if infers else minibatches[0].rows
        if not infers:
            metrics |= correction.measure(measured, self.version, settings)
        if settings.proximal == "loglinear":
            metrics |= correction.measure_interpolated_weights(measured, settings)
        scheduler = self.engine.lr_scheduler  # it stands still during critic warm-up, like the policy
        metrics["learner/lr"] = float(
            self.engine.lr_scheduler_step() if trains else scheduler.get_last_lr()[0]
        )
        self.version += 1
        self.row_records = [record_row(row, settings.bypass_mode) for row in own_rows]
        self.load_images({})  # whose features would stay on the device
        return metrics

    def _infer_before_update(self, rows: list[TrainRow], infers: bool) -> None:
        """Set the rows' values and log-probs; the policy's only if `infers`."""
        settings = self.settings
        if settings.bypass_mode:
            for row in rows:
                row.old_logprobs = row.engine_logprobs
        if infers:
            # the only step under dropout takes its own log-probs as the old ones, which have the same weights
            measures_only = not settings.needs_old_logprobs
            name = "learner_logprobs" if settings.bypass_mode or measures_only else "old_logprobs"
            if settings.has_token_baselines:
                logprobs, squares = self.engine.infer_with_squares(rows)
                self._set(rows, "sum_pi_squared", squares)
                if settings.importance_level is not None:
                    self._set(rows, name, logprobs)
                    correction.set_weights(rows, settings)
            else:
                logprobs = self.engine.infer(rows)
            self._set(rows, name, logprobs)
        if settings.needs_reference:
            self._set(rows, "ref_logprobs", self.infer_reference(rows))
        if self.critic is not None:
            self.critic.add_values(rows)

    def _set(self, rows: list[TrainRow], name: str, values: list[torch.Tensor]) -> None:
        for row, value in zip(rows, values, strict=True):
            setattr(row, name, value)

    def _step(self, minibatch: Minibatch, stores_logprobs: bool) -> dict[str, float]:
        """Take an optimizer step on one mini-batch. The old policy is the same for all of them."""
        settings = self.settings
        found = self.engine.train(
            minibatch,
            PolicyLoss(settings, minibatch.rows, stores_logprobs),
            entropy=settings.calculate_entropy or settings.entropy_coef != 0,
            entropy_grad=settings.entropy_coef != 0,
            observations=settings.observation_coef > 0,
            distill=self._distiller,
        )
        metrics = all_reduce_metrics(found)
        return rename_metrics(metrics) | self._gradients.check(metrics["grad_norm"])
