"""Configurations of agent-lightning's examples, the settings that VERL resolves one to, and the table of
docs/verl.md."""

import copy
from typing import Any

from flat_settings import FLAT_KEYS, flat_settings

from raylight.algorithms.policy import RunSettings
from raylight.algorithms.verl import VERL
from raylight.algorithms.verl_config.keys import KEYS, KeyRule
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig

MATH: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.6,
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"path": "models/tiny", "use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "AgentLightning",
        "experiment_name": "calc_x",
        "nnodes": 1,
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
}
"""Configuration of agent-lightning's examples/calc_x, with another model."""
TAU2: dict[str, Any] = {
    "agentlightning": {"port": 9999},
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 8, "max_prompt_length": 8192, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 8,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.8,
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
        "model": {"path": "models/tiny", "use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "logger": ["console", "wandb"],
        "project_name": "agent-framework-lab-lightning",
        "experiment_name": "tau2_agent",
        "nnodes": 1,
        "test_freq": 4,
        "total_epochs": 8,
    },
}
"""Configuration of the tau2 example of agent-framework's lab, with another model."""
BASE: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 8,
    "actor_rollout_ref.model.path": "models/tiny",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
}
"""Smallest configuration that trains, in dotted keys."""
OPEN = RunSettings(EngineConfig(), LearnerConfig(), CheckpointConfig())
"""Settings of a Trainer without arguments."""


def changed(config: dict[str, Any], dotted: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested configuration with other values."""
    config = copy.deepcopy(config)
    for key, value in dotted.items():
        *path, last = key.split(".")
        node = config
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return config


def settings_of(config: Any) -> dict[str, Any]:
    """Return every setting of a run, by target."""
    algorithm = VERL(config)
    combined = algorithm.adjust_run_settings(OPEN)
    settings = {
        "run.seed": combined.seed,
        "run.output_dir": combined.output_dir,
        "run.outputs": combined.outputs,
    }
    resolved = algorithm._resolution.algorithm_settings()  # also those that the loss does not read
    settings |= {f"algorithm.{key}": resolved[key] for key in FLAT_KEYS & resolved.keys()}
    settings["run.cpu_fallback"] = combined.cpu_fallback is not None
    sections = {
        "algorithm": algorithm,
        "engine": combined.engine,
        "learner": combined.learner,
        "checkpoint": combined.checkpoint,
    }
    if algorithm.critic is not None:
        sections["critic"] = algorithm.critic
    for section, values in sections.items():
        settings |= {f"{section}.{name}": value for name, value in flat_settings(values).items()}
    settings |= {f"engine.args.{name}": value for name, value in settings.pop("engine.args").items()}
    settings.pop("algorithm.critic")
    return settings


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `after` that differ from `before`."""
    assert before.keys() <= after.keys()
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


READ_WITH = {
    key: rule.key for rule in reversed(KEYS.values()) for key in rule.reads if not KEYS[key].target
} | {"critic.enable": "algorithm.adv_estimator"}
"""Key without its own setting -> the first key whose rule reads it."""


def doc_row(rule: KeyRule, section: str) -> str:
    """Return the row of a key in the tables of docs/verl.md."""
    if rule.target:
        others = ", ".join(f"`{name.removeprefix(f'{section}.')}`" for name in rule.reads)
        text = f"`{rule.target}`" + (f" (with {others})" if others else "")
        text += "; raylight's default if it is not set" if rule.own_default else ""
    elif rule.key in READ_WITH:
        text = f"read with `{READ_WITH[rule.key].removeprefix(f'{section}.')}`"
    elif rule.accepted is not None:
        values = (value if isinstance(value, str) else repr(value) for value in rule.accepted)
        text = f"only {' or '.join(f'`{value}`' for value in values)}: {rule.reason}"
    else:
        text = f"ignored: {rule.reason}"
    return f"| `{rule.key.removeprefix(f'{section}.')}` | {text} |"
