"""Construction of a rank's verl engines: the policy, its frozen reference, and the critic."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
)

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import CriticSettings, OptimizerSettings
from raylight.experience.settings.supervised_settings import PairSettings, SupervisedSettings
from raylight.images.model_inputs import ModelImages, reads_images
from raylight.learner import verl_api as verl
from raylight.learner.model.adapter import adapted_layers
from raylight.learner.model.fsdp import RaylightEngine, RewardEngine, ValueEngine
from raylight.learner.model.local_engine import LocalEngine
from raylight.learner.model.model_check import check_model, trained_class
from raylight.learner.model.packing import PACKED_VISION_MODELS, keeps_state
from raylight.learner.model.varlen_attention import VARLEN, supports_varlen
from raylight.learner.tokens.rows import make_probe_row

logger = logging.getLogger(__name__)

Built = TypeVar("Built", bound=RaylightEngine)

ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3}
"""Mean difference between a row's outputs alone and packed, relative to the largest output, that rounding
explains in any row."""
MAX_ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}
"""The same for the first packed row, which no other row can change."""
EAGER_MODELS = frozenset({"glm_moe_dsa"})
"""Types of models whose layers attend to later tokens with the attention "sdpa" of transformers, unless they
are given a mask."""


def build_policy(
    model_path: str,
    config: LearnerConfig,
    settings: OptimizerSettings,
    total_steps: int,
    module: torch.nn.Module | None = None,
) -> RaylightEngine:
    """Build the trained model: the full model, or an adapter with LoRA.

    Args:
        module: model in this process that is trained in place; None loads one.

    Raises:
        ConfigError: the model cannot be trained, or the settings do not fit the model or the machine.
    """
    check_model(model_path)
    if config.lora is not None:
        adapted_layers(model_path, config.lora)  # raises before weights are loaded
    if config.router_aux_loss_coef:
        _check_routers(model_path, config)
    if config.router_replay and isinstance(settings, SupervisedSettings):
        raise ConfigError(
            "nothing reads learner.router_replay in supervised training, whose tokens no engine sampled; "
            "leave it out"
        )
    _warn_about_unused_offload(config)
    cls = RaylightEngine if module is None else functools.partial(LocalEngine, module)
    return _build(cls, model_path, config, settings, total_steps)


def build_reference(model_path: str, config: LearnerConfig) -> RaylightEngine:
    """Build the initial model, which is never trained."""
    return _build(RaylightEngine, model_path, config, OptimizerSettings(), 1, forward_only=True)


def build_critic(
    model_path: str, config: LearnerConfig, settings: CriticSettings, total_steps: int
) -> ValueEngine:
    """Build a value model, trained in full, or with `lora` as an adapter and a full head."""
    return _build(ValueEngine, model_path, config, settings, total_steps)


def build_reward_model(
    model_path: str, config: LearnerConfig, settings: OptimizerSettings, total_steps: int
) -> RewardEngine:
    """Build a reward model from a language model, with a new head, or from a reward model.

    Raises:
        ConfigError: transformers has no such models of the architecture.
    """
    hf_config = AutoConfig.from_pretrained(model_path)
    unread = {"router_aux_loss_coef": config.router_aux_loss_coef, "router_replay": config.router_replay}
    for name, value in unread.items():
        if value:
            raise ConfigError(
                f"nothing reads learner.{name}={value} in the training of a reward model; leave it out"
            )
    kinds = (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
    if not all(type(hf_config) in kind for kind in kinds):
        raise ConfigError(
            f"transformers has no reward models of the architecture {hf_config.model_type}; choose a model "
            "of another one, such as Qwen or Llama"
        )
    return _build(RewardEngine, model_path, config, settings, total_steps)


def _build(
    cls: Callable[..., Built],
    model_path: str,
    config: LearnerConfig,
    settings: OptimizerSettings,
    total_steps: int,
    forward_only: bool = False,
) -> Built:
    reads_text_alone = cls in (ValueEngine, RewardEngine)
    images = ModelImages.load(model_path)
    if reads_text_alone and images is not None:
        raise ConfigError(
            f"{model_path} reads images, and critics and reward models that are trained read text alone; "
            "choose an algorithm without a critic, such as rl.GRPO, or a model without a vision part"
        )
    if config.packed:
        _check_layers(model_path, images is not None)
    settings.check_adapter(config.lora is not None and not forward_only)
    on_gpu = torch.cuda.is_available()
    lora = None if forward_only else config.lora
    parts = ["model"] if forward_only else ["model", "optimizer", "extra"]
    engine = cls(
        config,
        model_config=verl.HFModelConfig(
            path=model_path,
            load_tokenizer=False,  # with it, verl loads a processor too, which nothing reads
            tokenizer=verl.hf_tokenizer(model_path),
            model_type="value_model" if reads_text_alone else "language_model",
            use_remove_padding=config.packed,
            override_config={
                "attn_implementation": choose_attention(config, on_gpu, model_path, images is not None)
            },
            enable_gradient_checkpointing=config.gradient_checkpointing and not forward_only,
            lora_rank=lora.rank if lora else 0,
        ),
        engine_config=verl.FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="float32",
            use_torch_compile=config.torch_compile,
            mixed_precision={
                "param_dtype": config.dtype,
                "reduce_dtype": "float32",
                "buffer_dtype": "float32",
            },
            forward_only=forward_only,
            param_offload=config.param_offload and on_gpu,
            optimizer_offload=config.optimizer_offload and on_gpu,
            ulysses_sequence_parallel_size=config.ulysses,
            fsdp_size=config.fsdp_size or -1,
            use_no_sync_for_gradient_accumulation=config.no_sync,
            use_remove_padding=config.packed,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=config.max_tokens_per_micro_batch,
            infer_max_token_len_per_gpu=config.max_tokens_per_micro_batch,
        ),
        optimizer_config=optimizer_config(settings, total_steps),
        checkpoint_config=verl.CheckpointConfig(save_contents=parts, load_contents=parts),
    )
    # ratios and pair weights compare passes, which must have the same weights; answers alone need none
    learns_answers = isinstance(settings, SupervisedSettings)
    engine.keeps_dropout = learns_answers and not isinstance(settings, PairSettings)
    engine.images = images
    engine.initialize()
    if config.packed:
        _check_packing(engine, config, model_path)
    return engine


def optimizer_config(settings: OptimizerSettings, total_steps: int) -> verl.FSDPOptimizerConfig:
    """Convert the optimizer's settings to verl's."""
    muon = settings.optimizer == "muon"
    return verl.FSDPOptimizerConfig(
        optimizer="Muon" if muon else "AdamW",
        lr=settings.lr,
        lr_scheduler_type=settings.lr_schedule,
        lr_warmup_steps=settings.lr_warmup_steps,
        min_lr_ratio=settings.min_lr_ratio,
        total_training_steps=max(total_steps, 1),
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        clip_grad=settings.grad_clip,
        override_optimizer_config={"momentum": settings.muon_momentum} if muon else {"fused": True},
    )


def choose_attention(config: LearnerConfig, on_gpu: bool, model_path: str, reads_images: bool = False) -> str:
    """Return the attention implementation, eager if the architecture supports no faster one.

    Args:
        reads_images: the model is loaded with its vision part.

    Raises:
        ConfigError: an implementation is configured, or required by `ulysses`, that is not available, or not
            for float32 or this model.
    """
    from transformers.utils import is_flash_attn_2_available

    on_16_bits = on_gpu and config.dtype == "bfloat16"
    if config.attention == "flash_attention_2" and not (on_16_bits and is_flash_attn_2_available()):
        raise ConfigError(
            "learner.attention='flash_attention_2' needs a GPU and the package flash-attn on every learner, "
            f"and dtype='bfloat16' ({config.dtype!r} now); remove the setting, or provide them"
        )
    if config.attention != "auto":
        return config.attention
    hf_config = AutoConfig.from_pretrained(model_path)
    hf_config.architectures = [  # a reward model has the layers of a language model
        name.replace("ForSequenceClassification", "ForCausalLM") for name in hf_config.architectures or []
    ]
    architecture = trained_class(hf_config, reads_images)
    if config.packed and supports_varlen(hf_config, architecture) and (on_16_bits or not on_gpu):
        return VARLEN
    if config.ulysses > 1:
        raise ConfigError(
            f"learner.ulysses={config.ulysses} needs a model with packed rows in docs/models.md, and "
            f"dtype='bfloat16' on a GPU ({architecture.__name__} in {config.dtype!r} now); remove the setting"
        )
    flash = on_16_bits and is_flash_attn_2_available() and architecture._supports_flash_attn
    if config.packed and flash and not architecture._compatible_flash_implementations:
        return "flash_attention_2"
    is_causal = hf_config.get_text_config().model_type not in EAGER_MODELS
    return "sdpa" if architecture._supports_sdpa and is_causal else "eager"


def _check_routers(model_path: str, config: LearnerConfig) -> None:
    """Check that transformers has a load-balancing loss of the architecture.

    Raises:
        ConfigError: it has none: no mixture of experts, or one whose routers are balanced otherwise.
    """
    hf_config = AutoConfig.from_pretrained(model_path)
    architecture = trained_class(hf_config, reads_images(model_path))
    module = importlib.import_module(architecture.__module__)
    if not hasattr(module, "load_balancing_loss_func"):
        raise ConfigError(
            f"learner.router_aux_loss_coef={config.router_aux_loss_coef:g}: transformers has no "
            f"load-balancing loss of {architecture.__name__}; leave the setting out"
        )


def _warn_about_unused_offload(config: LearnerConfig) -> None:
    """Warn if settings of GPU memory are set on a CPU."""
    unused = [name for name in ("param_offload", "optimizer_offload") if getattr(config, name)]
    if unused and not torch.cuda.is_available() and torch.distributed.get_rank() == 0:
        logger.warning(
            "%s: no effect without a GPU, as everything is in host memory already", " and ".join(unused)
        )


def _check_layers(model_path: str, reads_images: bool) -> None:
    """Check that no layer carries a state from one packed row into the next, and that images need no mask of
    their own.

    Raises:
        ConfigError: one does, or they do.
    """
    whole = AutoConfig.from_pretrained(model_path)
    if reads_images and whole.model_type not in PACKED_VISION_MODELS:
        raise ConfigError(
            f"rows of {model_path} ({whole.model_type}) with images cannot be packed: tokens of an image may "
            "attend to each other, or layers keep a state; set learner.packed=False"
        )
    config = whole.get_text_config()
    if keeps_state(config.to_dict()):
        raise ConfigError(
            f"layers of {model_path} ({config.model_type}) keep a state that would go on from one packed row "
            "into the next; set learner.packed=False"
        )


def _check_packing(engine: RaylightEngine, config: LearnerConfig, model_path: str) -> None:
    """Compute two short rows, each alone and both packed together, and compare the outputs. A collective.

    No row can change the first one, so its difference is rounding; the second may differ ten times
    as much. This finds rows that are mixed, not attention that is wrong in both.

    Raises:
        ConfigError: the output of a row depends on the other row.
    """
    rows = [make_probe_row(range(1, 14)), make_probe_row(range(3, 13))]
    alone, packed = [engine.infer([row])[0] for row in rows], engine.infer(rows)
    largest = float(torch.cat(alone).abs().max())
    first, second = (float((one - other).abs().mean()) for one, other in zip(alone, packed, strict=True))
    allowed = max(10 * first, ROUNDING[config.dtype] * largest)
    if not (first <= MAX_ROUNDING[config.dtype] * largest and second <= allowed):
        raise ConfigError(
            f"with attention {engine.model_config.hf_config._attn_implementation!r} this "
            f"model mixes packed rows (log-probs of the second change by {second:.2g}, of the first by "
            f"{first:.2g}); set learner.packed=False"
        )
