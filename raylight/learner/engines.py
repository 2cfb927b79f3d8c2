"""verl's engines, as raylight builds them: the policy, its frozen reference, and the critic."""

from __future__ import annotations

from typing import Any

from raylight.config import LearnerConfig
from raylight.learner import verl_api as verl
from raylight.learner.settings import CriticSettings, OptimizerSettings, PolicySettings


def build_policy(model_path: str, config: LearnerConfig, settings: PolicySettings, total_steps: int) -> Any:
    """The model that is trained: all of it, or an adapter of it."""
    return _build("language_model", model_path, config, settings, total_steps)


def build_reference(model_path: str, config: LearnerConfig) -> Any:
    """The model as it was, which is never trained."""
    return _build("language_model", model_path, config, OptimizerSettings(), 1, forward_only=True)


def build_critic(model_path: str, config: LearnerConfig, settings: CriticSettings, total_steps: int) -> Any:
    """A model of values, one for each token."""
    return _build("value_model", model_path, config, settings, total_steps)


def _build(
    kind: str, model_path: str, config: LearnerConfig, settings: OptimizerSettings, total_steps: int, forward_only: bool = False
) -> Any:
    engine = verl.EngineRegistry.new(
        model_type=kind,
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
            mixed_precision={"param_dtype": config.dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            forward_only=forward_only,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=config.max_tokens_per_micro_batch,
            infer_max_token_len_per_gpu=config.max_tokens_per_micro_batch,
        ),
        optimizer_config=optimizer_config(settings, total_steps),
        checkpoint_config=verl.CheckpointConfig(save_contents=["hf_model"], load_contents=["hf_model"]),
    )
    engine.initialize()
    return engine


def optimizer_config(settings: OptimizerSettings, total_steps: int) -> Any:
    """verl's words for the optimizer's settings."""
    return verl.FSDPOptimizerConfig(
        lr=settings.lr, lr_warmup_steps=settings.lr_warmup_steps, total_training_steps=max(total_steps, 1),
        weight_decay=settings.weight_decay, clip_grad=settings.grad_clip,
    )  # fmt: skip
