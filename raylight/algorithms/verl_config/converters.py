"""Converters of verl's values into raylight's settings.

Each takes the value of its key and a reader of the whole configuration, and returns a setting or UNSET.
"""

from __future__ import annotations

import math
from typing import Any

from raylight._utils.bounds import MAX_SEED
from raylight.algorithms.verl_config.key_rules import UNSET, ConfigReader, Converter, UnsupportedValueError
from raylight.engines.families import FAMILIES
from raylight.experience.settings.advantages import ADVANTAGES, Advantage
from raylight.types import JsonObject

ACTOR, ROLLOUT, MODEL, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""verl's names of KL estimators -> raylight's."""
TOOL_PARSERS = {family.vllm_tools: family.notation for family in FAMILIES if family.vllm_tools}
"""vLLM's tool parsers -> the transformers engine's."""
ARGS_WITH_VERL_DEFAULT = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_model_parallel_size",
}
"""Arguments of vLLM for which verl's default holds -> verl's keys."""


def one_of(**names: object) -> Converter:
    """Return a converter of a fixed set of words."""
    return lambda value, read: _translate(names, value)


def _translate(names: JsonObject, value: object) -> Any:
    if value not in names:
        raise UnsupportedValueError(f"must be one of {', '.join(names)}")
    return names[value]


def if_enabled(switch: str, converter: Converter | None = None) -> Converter:
    """Return a converter that applies only if the key `switch` is true."""

    def convert(value: object, read: ConfigReader) -> Any:
        if not read(switch):
            return UNSET
        return converter(value, read) if converter else value

    return convert


def has_critic(read: ConfigReader) -> bool:
    """Return True if there is a critic, by verl's rule: `critic.enable`, or else the estimator `gae`."""
    enabled = read("critic.enable")
    return read("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def text(value: object, read: ConfigReader) -> str:
    """Return the value as a string."""
    return str(value)


def kl_type(value: Any, read: ConfigReader) -> str:
    """Return raylight's name of a KL estimator."""
    return _translate(KL_TYPES, value)


def kl_in_reward(value: bool, read: ConfigReader) -> float:
    """Return the coefficient of the KL penalty in the reward; 0 if it is off."""
    return read("algorithm.kl_ctrl.kl_coef") if value else 0.0


def kl_in_loss(value: bool, read: ConfigReader) -> float:
    """Return the coefficient of the KL penalty in the loss; 0 if it is off."""
    return read(f"{ACTOR}.kl_loss_coef") if value else 0.0


def kl_target(value: str, read: ConfigReader) -> object:
    """Return the target KL of the adaptive controller."""
    if not read("algorithm.use_kl_in_reward"):
        return UNSET
    return _translate({"fixed": UNSET, "adaptive": read("algorithm.kl_ctrl.target_kl")}, value)


def group_size(value: int, read: ConfigReader) -> int:
    """Return the number of rollouts per task, after checking that the estimator can use it."""
    estimator = read("algorithm.adv_estimator")
    if value < 2 and estimator in ADVANTAGES.names and _is_compared(estimator):
        raise UnsupportedValueError(
            f"must be 2 or more: {estimator} compares the rollouts of a task with one another"
        )
    return value


def _is_compared(estimator: str) -> bool:
    variant = ADVANTAGES.variant(estimator)
    return issubclass(variant, Advantage) and variant.BASELINE == "group"


def reward_weights(names: list[str] | None, read: ConfigReader) -> dict[str, float] | None:
    """Return the weights of named rewards, which are 1 by default; None without names."""
    if not names:
        return None
    weights = read("algorithm.gdpo_reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise UnsupportedValueError(
            f"has {len(names)} names, and algorithm.gdpo_reward_weights has {len(weights)} weights; give one "
            "each"
        )
    return dict(zip(names, weights, strict=True))


def zero_variance_groups(value: bool, read: ConfigReader) -> str:
    """Return the treatment of groups without reward variance."""
    return "drop" if value else "keep"


def rounds(value: int, read: ConfigReader) -> int:
    """Return the limit of rounds of new tasks per step; verl's 0, no limit, is not supported."""
    if value < 1:
        raise UnsupportedValueError("means no limit of rounds per step; set a limit, such as 10")
    return value


def max_staleness(mode: str, read: ConfigReader) -> int:
    """Return the limit of staleness; verl's threshold counts versions, the newest included."""
    asynchronous = one_of(sync=False, colocate_async=True, separate_async=True)
    if not asynchronous(mode, read):
        return 0
    threshold = read("trainer.v1.sampler.max_off_policy_threshold")
    if threshold is None or threshold < 2:
        raise UnsupportedValueError(
            "needs trainer.v1.sampler.max_off_policy_threshold of 2 versions or more; a limit is required"
        )
    return threshold - 1


def stale(strategy: str, read: ConfigReader) -> Any:
    """Return the treatment of groups with tokens that are too old."""
    if read("trainer.v1.trainer_mode") == "sync":
        return UNSET
    return one_of(drop="drop", wait="wait")(strategy, read)


def mini_batches(value: int, read: ConfigReader) -> int:
    """Return the number of mini-batches per step, from the mini-batch size in tasks."""
    return _mini_batches(value, read, read.is_set(f"{ACTOR}.ppo_mini_batch_size"))


def critic_mini_batches(value: int, read: ConfigReader) -> int:
    """Return the number of the critic's mini-batches per step, from the mini-batch size in tasks."""
    return _mini_batches(value, read, read.is_set("critic.ppo_mini_batch_size"))


def _mini_batches(size: int, read: ConfigReader, is_set: bool) -> int:
    batch = read("data.train_batch_size")
    if size >= batch and (size == batch or not is_set):  # verl's default may exceed the batch
        return 1
    if size < 1 or batch % size:
        raise UnsupportedValueError(f"must divide data.train_batch_size={batch} without remainder")
    return batch // size


def clip_low(value: float, read: ConfigReader) -> float:
    """Return the lower clip range: the value if the user set it, else `clip_ratio` if the user set that."""
    return _clip("clip_ratio_low", value, read)


def clip_high(value: float, read: ConfigReader) -> float:
    """Return the upper clip range: the value if the user set it, else `clip_ratio` if the user set that."""
    return _clip("clip_ratio_high", value, read)


def _clip(name: str, value: float, read: ConfigReader) -> float:
    if read.is_set(f"{ACTOR}.{name}") or not read.is_set(f"{ACTOR}.clip_ratio"):
        return value
    return read(f"{ACTOR}.clip_ratio")


def warmup(value: int | None, read: ConfigReader) -> int:
    """Return the policy's warm-up steps: as set, or a share of all steps."""
    return _warmup(value, read, f"{ACTOR}.optim.lr_warmup_steps_ratio")


def critic_warmup(value: int | None, read: ConfigReader) -> int:
    """Return the critic's warm-up steps: as set, or a share of all steps."""
    return _warmup(value, read, "critic.optim.lr_warmup_steps_ratio")


def _warmup(steps: int | None, read: ConfigReader, ratio_key: str) -> int:
    if steps is not None and steps > 0:
        return steps
    ratio, total = read(ratio_key), read("trainer.total_training_steps")
    if not ratio:
        return 0
    if total is None:
        raise UnsupportedValueError(
            f"leaves the steps to {ratio_key}, a share of trainer.total_training_steps, which is not set; "
            "set lr_warmup_steps or trainer.total_training_steps"
        )
    return int(ratio * total)


def positive_or_zero(value: int | None, read: ConfigReader) -> int:
    """Return the value, or 0 for verl's -1 (never)."""
    return max(value or 0, 0)


def positive_or_none(value: int | None, read: ConfigReader) -> int | None:
    """Return the value, or None for verl's -1 (never, not even at the end)."""
    return positive_or_zero(value, read) or None


def longest_row(value: Any, read: ConfigReader) -> int:
    """Return the tokens of the longest prompt plus response."""
    return read(f"{ROLLOUT}.max_model_len") or read("data.max_prompt_length") + read(
        "data.max_response_length"
    )


def token_budget(value: int, read: ConfigReader) -> int:
    """Return the tokens of a micro-batch: as set, or of `ppo_micro_batch_size_per_gpu` longest rows."""
    longest, rows = longest_row(None, read), read(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows and not read(f"{ACTOR}.use_dynamic_bsz"):
        return rows * longest
    if not read.is_set(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        return max(value, longest)
    if value < longest:
        raise UnsupportedValueError(
            f"must hold the longest row, which has {longest} tokens (data.max_prompt_length + "
            f"max_response_length)"
        )
    return value


def ranks(value: int, read: ConfigReader) -> int:
    """Return the number of learner ranks: GPUs per node times nodes."""
    return value * read("trainer.nnodes")


def shard_size(value: int, read: ConfigReader) -> int | None:
    """Return the ranks among which the model is sharded; None for verl's -1, and for more than there are."""
    return value if 0 < value < ranks(read("trainer.n_gpus_per_node"), read) else None


def replicas(value: int, read: ConfigReader) -> int:
    """Return the number of engines that fill all GPUs of the learners, which they share."""
    gpus = value * read("trainer.n_gpus_per_node")
    per_engine = read(f"{ROLLOUT}.tensor_model_parallel_size") if read(f"{ROLLOUT}.name") == "vllm" else 1
    if gpus % per_engine:
        raise UnsupportedValueError(
            f"gives {gpus} GPUs (trainer.nnodes x trainer.n_gpus_per_node), which cannot be divided into "
            f"engines of {ROLLOUT}.tensor_model_parallel_size={per_engine}"
        )
    return gpus // per_engine


def lora(value: int, read: ConfigReader) -> Any:
    """Return the settings of the adapter; None for rank 0."""
    if not value:
        return None
    return {
        "rank": value,
        "alpha": read(f"{MODEL}.lora_alpha"),
        "target_modules": read(f"{MODEL}.target_modules"),
        "exclude_modules": read(f"{MODEL}.exclude_modules") or None,
        "target_parameters": read(f"{MODEL}.target_parameters") or [],
    }


def engine_kind(value: Any, read: ConfigReader) -> str:
    """Return the kind of engine."""
    return _translate({"vllm": "vllm", "hf": "transformers"}, value)


def tool_parser(value: str, read: ConfigReader) -> JsonObject:
    """Return the engine's arguments for parsing tool calls."""
    if read(f"{ROLLOUT}.name") == "hf":
        return {"tool_parser": _translate(TOOL_PARSERS, value)}
    return vllm_args({"tool_call_parser": value, "enable_auto_tool_choice": True}, read)


def vllm_arg(name: str) -> Converter:
    """Return a converter that makes an argument of vLLM."""

    def convert(value: object, read: ConfigReader) -> Any:
        key = ARGS_WITH_VERL_DEFAULT.get(name)
        if key and read(f"{ROLLOUT}.name") != "vllm" and (value == 1 or not read.is_set(f"{ROLLOUT}.{key}")):
            return UNSET
        return vllm_args({name: value}, read)

    return convert


def vllm_args(args: JsonObject, read: ConfigReader) -> JsonObject:
    """Return arguments of vLLM, after checking that vLLM is the engine."""
    if not isinstance(args, dict):
        raise UnsupportedValueError("must be a mapping of vLLM's arguments")
    if args and read(f"{ROLLOUT}.name") != "vllm":
        raise UnsupportedValueError(
            f"is an argument of vLLM, and {ROLLOUT}.name is {read(f'{ROLLOUT}.name')!r}"
        )
    return args


def sleeps(value: bool, read: ConfigReader) -> bool:
    """Return True if engines free their memory while learners compute, which only vLLM can, and only if no
    rollout runs meanwhile."""
    return bool(value) and read(f"{ROLLOUT}.name") == "vllm" and read("trainer.v1.trainer_mode") == "sync"


def attention(value: str, read: ConfigReader) -> Any:
    """Return the attention implementation. Ranks that share sequences have raylight's own."""
    sizes = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    return UNSET if max(read(size) or 1 for size in sizes) > 1 else value


def seed(value: int | None, read: ConfigReader) -> int | None:
    """Return the seed of the run; None for raylight's default."""
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_SEED):
        raise UnsupportedValueError(f"must be a whole number from 0 to {MAX_SEED}")
    return value


def sampling(value: float, read: ConfigReader) -> JsonObject:
    """Return the sampling parameters of agents."""
    if isinstance(value, str | bool) or not 0 < value < math.inf:
        raise UnsupportedValueError(
            "must be a number above 0; greedy rollouts of a task are equal and give no signal"
        )
    return {"temperature": float(value)}


def project_folder(value: str, read: ConfigReader) -> str:
    """Return the folder for the runs of a project, or of its experiment if that is set."""
    if read.is_set("trainer.experiment_name"):
        return f"outputs/{value}/{read('trainer.experiment_name')}"
    return f"outputs/{value}"


def experiment_folder(value: str, read: ConfigReader) -> object:
    """Return the folder for the runs of an experiment without a project."""
    return UNSET if read.is_set("trainer.project_name") else f"outputs/{value}"


def trackers(value: Any, read: ConfigReader) -> Any:
    """Return the trackers of a list of loggers; the console and `metrics.jsonl` always receive metrics."""
    names = [value] if isinstance(value, str) else list(value)
    keys = {"project": "trainer.project_name", "name": "trainer.experiment_name"}
    run = {argument: str(read(key)) for argument, key in keys.items() if read.is_set(key)}
    trackers = ("wandb" if name == "tracking" else name for name in names)
    return [{"type": name} | run for name in trackers if name not in ("console", "file")] or UNSET
