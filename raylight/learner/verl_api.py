"""Everything that raylight uses of verl 0.9, in one place. Import it only in a process that trains: it takes seconds.

A contract test holds what is relied on here.
"""

from __future__ import annotations

import logging
import warnings

import torch

# importing verl puts a handler on the root logger, which would double every line of the process
_handlers = list(logging.getLogger().handlers)
warnings.filterwarnings("ignore", category=FutureWarning)

if not torch.cuda.is_available():
    from raylight.learner import verl_cpu

    verl_cpu.install_platform()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.config import AlgoConfig, CheckpointConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.utils import tensordict_utils
    from verl.utils.metric import Metric
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
    from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

if not torch.cuda.is_available():
    verl_cpu.register_engines()

logging.getLogger().handlers[:] = _handlers

__all__ = [
    "ActorConfig",
    "AlgoConfig",
    "CheckpointConfig",
    "EngineRegistry",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "Metric",
    "PolicyLossConfig",
    "get_adv_estimator_fn",
    "get_seqlen_balanced_partitions",
    "ppo_loss",
    "response_from_nested",
    "tensordict_utils",
]
