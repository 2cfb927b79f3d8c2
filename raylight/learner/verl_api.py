"""The parts of verl 0.9 that raylight uses; no other module imports verl, apart from `verl_cpu`.

Import this only in a process that trains, since it takes seconds. A contract test checks the properties
relied on here.
"""

from __future__ import annotations

import warnings

import torch

from raylight.log import kept_root_logger

# verl adds a handler to the root logger, which would print every log line twice
with warnings.catch_warnings(), kept_root_logger():
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        from raylight.learner import verl_cpu

        verl_cpu.install_platform()
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
    from verl.utils.device import get_device_id, get_device_name
    from verl.utils.fsdp_utils import get_init_weight_context_manager
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.utils.tokenizer import hf_tokenizer
    from verl.utils.torch_functional import masked_mean, masked_whiten
    from verl.utils.ulysses import (
        gather_heads_scatter_seq,
        gather_seq_scatter_heads,
        get_ulysses_sequence_parallel_world_size,
        ulysses_pad_and_slice_inputs,
    )
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
    )
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
