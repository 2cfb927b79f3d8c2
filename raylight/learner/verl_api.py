"""The parts of verl 0.9 that raylight uses; no other module imports verl, apart from `verl_cpu`.

Import this only in a process that trains, since it takes seconds. A contract test checks the properties
relied on here.
"""

from __future__ import annotations

import logging
import sys
import warnings
from unittest import mock

import torch

from raylight.deferred_imports import defer_imports

# importing verl adds a handler to the root logger, which would print every log line twice
_handlers = list(logging.getLogger().handlers)
warnings.filterwarnings("ignore", category=FutureWarning)

if not torch.cuda.is_available():
    from raylight.learner import verl_cpu

    verl_cpu.install_platform()

# the readers of data sets would import datasets and pandas, a loss of transformers scipy
_unused = ("verl.utils.dataset.rl_dataset", "verl.utils.dataset.rm_dataset", "scipy.optimize")
with warnings.catch_warnings(), defer_imports(*_unused):
    warnings.simplefilter("ignore")
    from verl.trainer.config import AlgoConfig, CheckpointConfig
    from verl.trainer.ppo.core_algos import (
        ADV_ESTIMATOR_REGISTRY,
        POLICY_LOSS_REGISTRY,
        AdaptiveKLController,
        FixedKLController,
        agg_loss,
        compute_value_loss,
        get_adv_estimator_fn,
        get_policy_loss_fn,
        kl_penalty,
        register_policy_loss,
    )
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
    from verl.utils.device import get_device_id
    from verl.utils.import_utils import is_trl_available
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.utils.torch_functional import masked_mean, masked_whiten
    from verl.utils.ulysses import ulysses_pad_and_slice_inputs
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
    )
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

# verl caches the answer: with TRL installed, it would import a class that newer versions of TRL lack
with mock.patch.dict(sys.modules, {"trl": None}):
    is_trl_available()

logging.getLogger().handlers[:] = _handlers

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "ActorConfig",
    "AdaptiveKLController",
    "AlgoConfig",
    "CheckpointConfig",
    "FSDPEngineConfig",
    "FSDPEngineWithLMHead",
    "FSDPOptimizerConfig",
    "FixedKLController",
    "HFModelConfig",
    "Metric",
    "PolicyLossConfig",
    "agg_loss",
    "append_to_dict",
    "compute_rollout_rejection_mask",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_device_id",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_whiten",
    "register_policy_loss",
    "ulysses_pad_and_slice_inputs",
]
