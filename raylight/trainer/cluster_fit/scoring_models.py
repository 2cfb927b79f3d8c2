"""Settings of the models that score for a run, its teacher and reward models, and checks that they can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.teacher import TeacherConfig
from raylight.config import EngineConfig
from raylight.engines.registry import choose_engine, engine_traits
from raylight.errors import ConfigError
from raylight.experience.token_alignment import load_aligner
from raylight.rewards.group import GroupReward
from raylight.rewards.scoring_model import ScoringModel, find_reward_models
from raylight.trainer.cluster_fit.hardware import engine_on_gpu, longest_sequence
from raylight.trainer.cluster_fit.model_shape import read_config
from raylight.trainer.spec.inputs import resolve_model
from raylight.trainer.spec.settings import (
    RankTeacher,
    RewardModelSettings,
    ServedTeacher,
    ServingSettings,
    TeacherSettings,
)

TEACHER_NAME = "teacher"
APP_NAME = "reward-model"
ENGINE = "raylight.engines.reward_model.engine:RewardModelEngine"
"""The engine of reward models, which scores by transformers."""
NO_LIMIT = 10**9
"""Tokenizers state a larger number if they know no limit."""
VLLM_LOGPROBS = 20
"""Log-probs of a token that vLLM gives by default."""
PROMPT_ROOM = 1024
"""Tokens by which a teacher's own prompt may be longer than the policy's, if its model takes so many."""


def plan_teachers(algorithm: PolicyAlgorithm, model_path: str) -> dict[str, TeacherSettings]:
    """Return the settings of a run's teachers by name.

    Args:
        model_path: folder of the policy's initial model.

    Raises:
        ModelNotFoundError: the model does not exist.
        ConfigError: an engine is not installed, or the tokens of a teacher are not the policy's.
    """
    return {
        name: _plan_teacher(algorithm, teacher, model_path, f"{TEACHER_NAME}{f'-{number}' * (number > 1)}")
        for number, (name, teacher) in enumerate(algorithm.teacher_models.items(), 1)
    }


def _plan_teacher(
    algorithm: PolicyAlgorithm, teacher: TeacherConfig, model_path: str, app_name: str
) -> TeacherSettings:
    path = resolve_model(teacher.model)
    aligned_to = model_path if teacher.tokenizer == "aligned" else None
    if aligned_to is None:
        check_same_tokens(model_path, path)
    else:
        load_aligner(aligned_to, path)
    # named by its folder, whatever the working directory
    teacher = teacher.model_copy(update={"model": path})
    if algorithm.has_local_teacher:
        return RankTeacher(teacher)
    engine = teacher.engine()
    engine = engine.model_copy(update={"kind": choose_engine(engine)})
    top_k = getattr(algorithm.advantage, "teacher_top_k", None)
    if top_k is not None:
        _check_top_k(path, top_k)
        if name := engine_traits(engine.kind).logprobs_arg:
            limit = max(top_k, engine.args.get(name, VLLM_LOGPROBS))
            engine = engine.model_copy(update={"args": engine.args | {name: limit}})
    return ServedTeacher(teacher, ServingSettings(path, engine, app_name), top_k, aligned_to)


def _check_top_k(path: str, top_k: int) -> None:
    vocabulary = read_config(path).get_text_config().vocab_size
    if top_k >= vocabulary:
        raise ConfigError(
            f"teacher_top_k={top_k} is not less than the {vocabulary} tokens of the teacher {path}; lower "
            "it, or leave it out for a teacher on the learners' ranks"
        )


def check_stays(teacher_path: str, folder: str) -> None:
    """Check that a run does not write its teacher: a replaced replica would load other weights.

    Raises:
        ConfigError: the teacher is in the run directory.
    """
    if Path(teacher_path).resolve().is_relative_to(Path(folder).resolve()):
        raise ConfigError(
            f"the teacher {teacher_path} is in the run directory, and the run writes its own models there; "
            "copy it to another folder, or choose another output_dir"
        )


def check_same_tokens(model_path: str, teacher_path: str) -> None:
    """Check that a teacher reads token ids as the policy does. It may have further tokens.

    Raises:
        ConfigError: it does not, or a model has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    tokens = []
    for path in (model_path, teacher_path):
        try:
            tokens.append(AutoTokenizer.from_pretrained(path).get_vocab())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer of {path} cannot be loaded: {error}") from None
    own, others = tokens
    different = [token for token, number in own.items() if others.get(token) != number]
    if different:
        first = min(different, key=lambda token: own[token])
        raise ConfigError(
            f"the teacher {teacher_path} has another tokenizer than {model_path}: {len(different)} of "
            f"{len(own)} tokens differ, such as {first!r}, which is {own[first]} here and "
            f"{others.get(first, 'no token')} there; choose a teacher of the same family, compare texts by "
            "TeacherConfig(tokenizer='aligned'), or learn its answers as text with rl.SFT"
        )


def fit_teacher(teacher: TeacherSettings, model_path: str, policy: EngineConfig) -> TeacherSettings:
    """Return the settings of a teacher that takes rows as long as the policy's, and longer ones if it
    reads other prompts.

    Args:
        model_path: folder of the policy's initial model.
        policy: the engine that samples from the policy.

    Raises:
        ConfigError: its model takes only shorter ones, or its `max_model_len` is shorter.
    """
    own = longest_sequence(Path(model_path))
    row, path = min(policy.max_model_len, own or policy.max_model_len), teacher.config.model
    limit = longest_sequence(Path(path))
    if isinstance(teacher, RankTeacher):
        if limit is not None and limit < row:
            raise ConfigError(
                f"the teacher {path} takes {limit} tokens, and rows of the policy have up to {row} "
                f"(engine.max_model_len); set engine={{'max_model_len': {limit}}}, or choose another teacher"
            )
        return teacher
    engine = fitted_engine(teacher.config, teacher.serving.engine, row)
    if limit is not None and limit < engine.max_model_len:
        needed = longest_row(engine)
        one_more = f", to which {engine.kind} adds one" if needed < engine.max_model_len else ""
        if needed > row:
            raise ConfigError(
                f"the teacher {path} takes {limit} tokens, and its max_model_len is "
                f"{needed}{one_more}; set it to {limit - engine.max_model_len + needed} at most"
            )
        raise ConfigError(
            f"the teacher {path} takes {limit} tokens, and rows of the policy have up to {row} "
            f"(engine.max_model_len){one_more}; set engine={{'max_model_len': "
            f"{limit - engine.max_model_len + row}}}, or choose another teacher"
        )
    return replace(teacher, serving=replace(teacher.serving, engine=engine))


def without_images(engine: EngineConfig) -> EngineConfig:
    """Return the settings of a policy's engine that refuses images, which no teacher in engines reads.

    Raises:
        ConfigError: the user allows some.
    """
    if "max_images" in engine.model_fields_set and engine.max_images:
        raise ConfigError(
            f"engine.max_images={engine.max_images}: a teacher in engines reads tokens alone; leave the "
            "setting out, or give the teacher kind='learner' and a divergence over the vocabulary"
        )
    return engine.model_copy(update={"max_images": 0})


def fitted_engine(config: TeacherConfig, engine: EngineConfig, row: int) -> EngineConfig:
    """Return the settings of a teacher's engine that scores the rows of a policy.

    An engine that scores by sampling samples a token after each row. Another one scores a row at a time and
    needs no cache.

    Args:
        row: tokens of the policy's longest row.

    Raises:
        ConfigError: the teacher's `max_model_len` is shorter.
    """
    engine = engine_on_gpu(engine, None, None) if engine.num_gpus else engine
    more = int(engine_traits(engine.kind).scores_by_sampling)
    longest = config.max_model_len
    if longest is None:
        limit = longest_sequence(Path(config.model))
        room = PROMPT_ROOM if config.prompt is not None or config.tokenizer == "aligned" else 0
        longest = row + (room if limit is None else max(min(room, limit - more - row), 0))
    if longest < row:
        raise ConfigError(
            f"the teacher's max_model_len is {longest}, and rows of the policy have up to {row} tokens "
            f"(engine.max_model_len); set it to {row} or more"
        )
    if more:
        return engine.model_copy(update={"max_model_len": longest + more})
    return engine.model_copy(update={"max_model_len": longest, "max_concurrent": 1})


def longest_row(engine: EngineConfig) -> int:
    """Return the tokens of the longest row that a teacher's engine scores."""
    return engine.max_model_len - int(engine_traits(engine.kind).scores_by_sampling)


def plan_reward_models(group_reward: GroupReward | None) -> tuple[RewardModelSettings, ...]:
    """Return the settings of the reward models that a group reward names.

    Raises:
        ModelNotFoundError: the model does not exist.
        ConfigError: a model has no scalar head, no chat template or no limit, or two have one name.
    """
    models = find_reward_models(group_reward)
    names = [model.name for model in models]
    if len({*names}) < len(names):
        raise ConfigError(
            f"the reward models of the group reward are named {', '.join(names)}; give each another name=..."
        )
    return tuple(_plan_reward_model(model, number) for number, model in enumerate(models, 1))


def _plan_reward_model(model: ScoringModel, number: int) -> RewardModelSettings:
    config = model.config
    path = resolve_model(config.model)
    engine = config.engine()
    limit = check_reward_model(path, config.max_tokens)
    args = {"max_batch_tokens": config.max_batch_tokens}
    update = {"kind": ENGINE, "max_model_len": limit, "args": args}
    # set, so that hardware does not change it as a default
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
    engine = one.serving.engine
    if not engine.num_gpus:
        return one
    return replace(one, serving=replace(one.serving, engine=engine_on_gpu(engine, None, None)))
