"""Training configuration for `VERL`, in the format of agent-lightning and verl."""

from __future__ import annotations

import copy
from typing import Any

CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 8, "max_prompt_length": 8192, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "name": "vllm",
            "n": 8,
            "tensor_model_parallel_size": 1,
            "gpu_memory_utilization": 0.8,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
        },
        "actor": {
            "ppo_mini_batch_size": 8,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "logger": ["console"],
        "project_name": "raylight",
        "experiment_name": "tau2_agent",
        "val_before_train": True,
        "test_freq": 4,
        "total_epochs": 8,
    },
}

SMALL = {
    "data": {"train_batch_size": 2},
    "actor_rollout_ref": {
        "rollout": {"name": "hf", "n": 2},
        "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1},
    },
    "trainer": {"test_freq": 2},
}
"""Changes for a small test run."""
VLLM_ONLY = ("gpu_memory_utilization",)


def verl_config(
    model: str, steps: int | None = None, small: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """Return a new copy of the configuration for a model.

    Args:
        model: folder or name of a Hugging Face model whose chat template supports tools.
        steps: number of steps; eight epochs if it is None.
        small: small batches, and raylight's own engine.
        cpu: leave GPUs alone.
    """
    config = _merged(CONFIG, SMALL) if small else copy.deepcopy(CONFIG)
    for key in VLLM_ONLY if small else ():
        del config["actor_rollout_ref"]["rollout"][key]
    config["actor_rollout_ref"]["model"]["path"] = model
    config["trainer"] |= {"total_training_steps": steps} if steps else {}
    config["trainer"] |= {"device": "cpu"} if cpu else {}
    return config


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(below)
    for key, value in above.items():
        merged[key] = _merged(merged[key], value) if isinstance(value, dict) else value
    return merged
