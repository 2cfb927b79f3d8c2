"""verl's training engine on a whole module of this process, which an engine samples from."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from raylight.config import LearnerConfig
from raylight.learner.model.fsdp import RaylightEngine, disable_dropout
from raylight.learner.tokens.response_logprobs import LogprobHead
from raylight.learner.tokens.token_logprobs import SMALL_CHUNK


class LocalEngine(RaylightEngine):
    """Engine that trains a module in place, the only copy of the weights.

    Nothing is sharded, and it computes in the module's own data types, as sampling does.

    Args:
        module: causal language model of transformers, to which the adapter is added in place.
    """

    def __init__(self, module: torch.nn.Module, learner: LearnerConfig, **configs: object) -> None:
        super().__init__(learner, **configs)
        self.module: Any = module
        self._autocast_dtype = torch.float32

    def _init_device_mesh(self) -> None:
        self.device_mesh = self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size, self.use_ulysses_sp = 1, False

    def initialize(self) -> None:
        """Add the adapter, and build the optimizer and the learning-rate schedule."""
        if self.model_config.enable_gradient_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        if not self.keeps_dropout:
            disable_dropout(self.module)
        self.head = LogprobHead(self.module, SMALL_CHUNK)
        self._add_vision(self.module)
        if self._is_lora:
            self.module = self._build_lora_module(self.module)
        with contextlib.redirect_stdout(None):  # verl prints the schedule
            self.optimizer = self._build_optimizer(self.module)
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self.module.eval()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def collective_device(self) -> torch.device:
        return torch.device("cpu")
