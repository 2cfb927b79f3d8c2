"""Several policies on one rank: LoRA adapters of one base, which share its weights and its engine."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import ModelShard, shard_by_model
from raylight.experience.batches.token_records import RowRecord
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner import verl_api as verl
from raylight.learner.model import weights
from raylight.learner.model.verl_engines import build_policy, optimizer_config
from raylight.learner.protocol import ModelSettings
from raylight.learner.updates.policy import Policy


class _Slot(NamedTuple):
    """State of a model that the engine has while it is active."""

    adapter: dict[str, torch.Tensor]
    """Values of the adapter while another model is active."""
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    optimizer_config: verl.FSDPOptimizerConfig


class PolicySet:
    """The models of a run with several: adapters of one base with the same rank and layers.

    The engine has one adapter and one optimizer at a time, the active model's; `use` exchanges them.
    So each model has gradients, moments, a schedule and a KL controller, and the memory of its
    adapter and moments. Every method is a collective that all ranks call with the same arguments.

    Args:
        models: at least one, by name.
        total_steps: updates of the whole run, for the learning-rate schedules.

    Raises:
        ConfigError: an initial adapter does not fit the settings of the adapters.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, models: Mapping[str, ModelSettings], total_steps: int
    ) -> None:
        first = next(iter(models.values())).policy
        self.engine = build_policy(model_path, config, first, total_steps)
        self.policies = {
            name: Policy(model_path, config, model.policy, total_steps, engine=self.engine)
            for name, model in models.items()
        }
        self._active = next(iter(models))
        self._slots = {name: self._build_slot(model.policy, total_steps) for name, model in models.items()}
        for name, model in models.items():
            if model.adapter is not None:
                self.use(name)
                weights.load_adapter(self.engine, model.adapter)
        self.row_records: list[RowRecord] = []
        """Log-probs and advantages of this rank's rows in the last update."""

    def _build_slot(self, settings: PolicySettings, total_steps: int) -> _Slot:
        engine = self.engine
        engine.optimizer_config = optimizer_config(settings, total_steps)
        engine.optimizer = engine._build_optimizer(engine.module)
        engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
        values = {name: param.detach().clone() for name, param in self._adapter().items()}
        return _Slot(values, engine.optimizer, engine.lr_scheduler, engine.optimizer_config)

    def _adapter(self) -> dict[str, torch.nn.Parameter]:
        return {name: param for name, param in self.engine.module.named_parameters() if param.requires_grad}

    def use(self, name: str) -> Policy:
        """Make a model the active one, and return it."""
        active, wanted, engine = self._slots[self._active], self._slots[name], self.engine
        engine.optimizer, engine.lr_scheduler = wanted.optimizer, wanted.lr_scheduler
        engine.optimizer_config = wanted.optimizer_config
        if name != self._active:
            with torch.no_grad():
                for key, param in self._adapter().items():
                    active.adapter[key].copy_(param)
                    param.copy_(wanted.adapter[key])
            self._active = name
        return self.policies[name]

    @property
    def version(self) -> int:
        """Version of all models, which is the number of updates of the run."""
        return next(iter(self.policies.values())).version

    @version.setter
    def version(self, version: int) -> None:
        for policy in self.policies.values():
            policy.version = version

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the models with a batch that every rank has as a whole; see `update_shard`."""
        ranks, rank = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        settings = {name: policy.settings for name, policy in self.policies.items()}
        return self.update_shard(shard_by_model(batch, settings, ranks)[rank])

    def update_shard(self, shards: Mapping[str, ModelShard]) -> dict[str, float]:
        """Update each model with this rank's shard of its part of a batch, and return metrics, equal on all
        ranks: `model/NAME/...` of each model that was trained, and their means without this prefix. A model
        without a part keeps its weights.

        Raises:
            MismatchError, NonFiniteGradientError: as for `Policy.update_shard`.
        """
        version, found = self.version, {}
        self.row_records = []
        for name, part in shards.items():
            policy = self.use(name)
            found[name] = policy.update_shard(part.shard)
            self.row_records += [
                RowRecord(part.rows[row.index], row.start, row.logprobs, row.advantages)
                for row in policy.row_records
            ]
        self.version = version + 1
        return _join_metrics(found)


def _join_metrics(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all models, and the means over the models that have them."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    metrics: dict[str, float] = {}
    for model, own in found.items():
        for name, value in own.items():
            metrics[f"model/{model}/{name}"] = value
            values[name].append(value)
    return metrics | {name: statistics.fmean(own) for name, own in values.items()}
