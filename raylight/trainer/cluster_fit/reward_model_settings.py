"""Settings of the reward models of a run, and checks that they can score conversations."""

from __future__ import annotations

from dataclasses import replace

from raylight.config import EngineConfig
from raylight.errors import ConfigError
from raylight.rewards.group import GroupReward
from raylight.rewards.scoring_model import RewardModel, find_reward_models
from raylight.trainer.cluster_fit.hardware import engine_on_gpu
from raylight.trainer.spec.inputs import resolve_model
from raylight.trainer.spec.settings import RewardModelSettings, ServingSettings

APP_NAME = "reward-model"
ENGINE = "raylight.engines.reward_model.engine:RewardModelEngine"
"""The engine that scores by transformers."""
NO_LIMIT = 10**9
"""Tokenizers state a larger number if they know no limit."""


def plan_reward_models(group_reward: GroupReward | None) -> tuple[RewardModelSettings, ...]:
    """Return the settings of the reward models that a group reward names.

    Raises:
        ModelNotFoundError: there is no such model.
        ConfigError: a model has no scalar head, no chat template or no limit, or two have one name.
    """
    models = find_reward_models(group_reward)
    names = [model.name for model in models]
    if len({*names}) < len(names):
        raise ConfigError(
            f"the reward models of the group reward are named {', '.join(names)}; give each another name=..."
        )
    return tuple(_plan(model, number) for number, model in enumerate(models, 1))


def _plan(model: RewardModel, number: int) -> RewardModelSettings:
    config = model.config
    path = resolve_model(config.model)
    engine = config.engine()
    limit = check_reward_model(path, config.max_tokens)
    args = {"max_batch_tokens": config.max_batch_tokens}
    update = {"kind": ENGINE, "max_model_len": limit, "args": args}
    # set, so that it is no default that hardware changes
    engine = EngineConfig(**engine.model_dump(exclude_unset=True) | update)
    name = APP_NAME if number == 1 else f"{APP_NAME}-{number}"
    return RewardModelSettings(model, ServingSettings(path, engine, name))


def check_reward_model(path: str, max_tokens: int | None) -> int:
    """Return the longest conversation that a reward model scores, in tokens.

    Raises:
        ConfigError: it has another head than one for a number, no chat template, or no limit.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the reward model {path} cannot be loaded: {error}") from None
    classes = config.architectures or ["no architecture"]
    if not classes[0].endswith("ForSequenceClassification"):
        raise ConfigError(
            f"the reward model {path} is a {classes[0]}, without a head that gives a score; choose an "
            "AutoModelForSequenceClassification with num_labels=1, as TRL's RewardTrainer saves it, or use a "
            "model that answers as a judge: rl.rewards.ruler, rl.rewards.rubric"
        )
    if config.num_labels != 1:
        labels = ", ".join(map(str, list(config.id2label.values())[:5]))
        raise ConfigError(
            f"the reward model {path} has {config.num_labels} labels ({labels}), and a reward is one number; "
            "choose a model with num_labels=1"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of the reward model {path} has no chat template, by which it was trained to read "
            "conversations; set tokenizer.chat_template, and save the tokenizer into the folder"
        )
    stated = (getattr(config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length)
    limits = [limit for limit in (*stated, max_tokens) if limit is not None and 0 < limit < NO_LIMIT]
    if not limits:
        raise ConfigError(f"the reward model {path} states no longest sequence; give it max_tokens=...")
    return min(limits)


def on_hardware(one: RewardModelSettings) -> RewardModelSettings:
    """Return the settings of a reward model with the defaults for the hardware."""
    engine = one.serving.engine
    if not engine.num_gpus:
        return one
    return replace(one, serving=replace(one.serving, engine=engine_on_gpu(engine, None, None)))
