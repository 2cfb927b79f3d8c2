"""Converters of verl's values into raylight's settings.

Each takes its key and the configuration, and returns a setting or UNSET.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from raylight._utils.bounds import MAX_SEED
from raylight.algorithms.verl_config.merged_config import MergedConfig
from raylight.engines.families import FAMILIES
from raylight.experience.settings.advantages import ADVANTAGES, Advantage
from raylight.types import JsonObject

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
TOOL_PARSERS = {family.vllm_tools: family.notation for family in FAMILIES if family.vllm_tools}
"""vLLM's tool parsers -> the transformers engine's."""
Converter = Callable[[str, MergedConfig], object]


class UnsupportedValueError(Exception):
    """Value that raylight does not support; the text follows `key=value` and has the reason or the remedy."""


class _KeepDefault:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _KeepDefault()
"""Return value of a converter that leaves its setting at raylight's default."""


def translate(names: Mapping[Any, object], value: object) -> Any:
    """Return the translation of a word.

    Raises:
        UnsupportedValueError: it has none.
    """
    if value not in names:
        raise UnsupportedValueError(f"must be one of {', '.join(map(str, names))}")
    return names[value]


def has_critic(read: MergedConfig) -> bool:
    """Return True if there is a critic, by verl's rule: `critic.enable`, or else the estimator `gae`."""
    enabled = read("critic.enable")
    return read("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def text(key: str, read: MergedConfig) -> str:
    return str(read(key))


def kl_in_reward(key: str, read: MergedConfig) -> float:
    """Return the coefficient of the KL penalty in the reward; 0 if it is off."""
    return read("algorithm.kl_ctrl.kl_coef") if read(key) else 0.0


def kl_in_loss(key: str, read: MergedConfig) -> float:
    """Return the coefficient of the KL penalty in the loss; 0 if it is off."""
    return read(f"{ACTOR}.kl_loss_coef") if read(key) else 0.0


def kl_target(key: str, read: MergedConfig) -> object:
    return translate({"fixed": UNSET, "adaptive": read("algorithm.kl_ctrl.target_kl")}, read(key))


def group_size(key: str, read: MergedConfig) -> int:
    """Return the number of rollouts per task, after checking that the estimator can use it."""
    estimator = read("algorithm.adv_estimator")
    if read(key) < 2 and estimator in ADVANTAGES.names and _is_compared(estimator):
        raise UnsupportedValueError(
            f"must be 2 or more: {estimator} compares the rollouts of a task with one another"
        )
    return read(key)


def _is_compared(estimator: str) -> bool:
    variant = ADVANTAGES.variant(estimator)
    return issubclass(variant, Advantage) and variant.BASELINE == "group"


def reward_weights(key: str, read: MergedConfig) -> dict[str, float] | None:
    """Return the weights of named rewards, which are 1 by default; None without names."""
    names = read(key)
    if not names:
        return None
    weights = read("algorithm.gdpo_reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise UnsupportedValueError(
            f"has {len(names)} names, and algorithm.gdpo_reward_weights has {len(weights)} weights; give one "
            "each"
        )
    return dict(zip(names, weights, strict=True))


def rounds(key: str, read: MergedConfig) -> int:
    """Return the limit of rounds of new tasks per step; verl's 0, no limit, is not supported."""
    if read(key) < 1:
        raise UnsupportedValueError("means no limit of rounds per step; set a limit, such as 10")
    return read(key)


def max_staleness(key: str, read: MergedConfig) -> int:
    """Return the limit of staleness; verl's threshold counts versions, the newest included."""
    if not translate({"sync": False, "colocate_async": True, "separate_async": True}, read(key)):
        return 0
    threshold = read("trainer.v1.sampler.max_off_policy_threshold")
    if threshold is None or threshold < 2:
        raise UnsupportedValueError(
            "needs trainer.v1.sampler.max_off_policy_threshold of 2 versions or more; a limit is required"
        )
    return threshold - 1


def stale(key: str, read: MergedConfig) -> object:
    """Return the treatment of groups with tokens that are too old."""
    if read("trainer.v1.trainer_mode") == "sync":
        return UNSET
    return translate({"drop": "drop", "wait": "wait"}, read(key))


def mini_batches(key: str, read: MergedConfig) -> int:
    """Return the number of mini-batches per step, from the mini-batch size in tasks."""
    size, batch = read(key), read("data.train_batch_size")
    if size >= batch and (size == batch or not read.is_set(key)):  # verl's default may exceed the batch
        return 1
    if size < 1 or batch % size:
        raise UnsupportedValueError(f"must divide data.train_batch_size={batch} without remainder")
    return batch // size


def clip(key: str, read: MergedConfig) -> float:
    """Return a bound of the clip range: the value if the user set it, else `clip_ratio` if the user set
    that."""
    common = f"{ACTOR}.clip_ratio"
    return read(common if read.is_set(common) and not read.is_set(key) else key)


def warmup(key: str, read: MergedConfig) -> int:
    """Return the warm-up steps: as set, or a share of all steps."""
    steps, ratio, total = read(key), read(f"{key}_ratio"), read("trainer.total_training_steps")
    if steps is not None and steps > 0:
        return steps
    if not ratio:
        return 0
    if total is None:
        raise UnsupportedValueError(
            f"leaves the steps to {key}_ratio, a share of trainer.total_training_steps, which is not set; "
            "set lr_warmup_steps or trainer.total_training_steps"
        )
    return int(ratio * total)


def positive_or_zero(key: str, read: MergedConfig) -> int:
    """Return the value, or 0 for verl's -1 (never)."""
    return max(read(key) or 0, 0)


def positive_or_none(key: str, read: MergedConfig) -> int | None:
    """Return the value, or None for verl's -1 (never, not even at the end)."""
    return positive_or_zero(key, read) or None


def longest_row(key: str, read: MergedConfig) -> int:
    """Return the tokens of the longest prompt plus response."""
    lengths = read("data.max_prompt_length") + read("data.max_response_length")
    return read(f"{ROLLOUT}.max_model_len") or lengths


def token_budget(key: str, read: MergedConfig) -> int:
    """Return the tokens of a micro-batch: as set, or of `ppo_micro_batch_size_per_gpu` longest rows."""
    longest, rows = longest_row(key, read), read(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows and not read(f"{ACTOR}.use_dynamic_bsz"):
        return rows * longest
    if not read.is_set(key):
        return max(read(key), longest)
    if read(key) < longest:
        raise UnsupportedValueError(
            f"must hold the longest row, which has {longest} tokens (data.max_prompt_length + "
            f"max_response_length)"
        )
    return read(key)


def ranks(key: str, read: MergedConfig) -> int:
    """Return the number of learner ranks: GPUs per node times nodes."""
    return read("trainer.n_gpus_per_node") * read("trainer.nnodes")


def shard_size(key: str, read: MergedConfig) -> int | None:
    """Return the ranks among which the model is sharded; None for verl's -1, and for more than there are."""
    return read(key) if 0 < read(key) < ranks(key, read) else None


def replicas(key: str, read: MergedConfig) -> int:
    """Return the number of engines that fill all GPUs of the learners, which they share."""
    gpus = ranks(key, read)
    per_engine = read(f"{ROLLOUT}.tensor_model_parallel_size") if _has_vllm(read) else 1
    if gpus % per_engine:
        raise UnsupportedValueError(
            f"gives {gpus} GPUs (trainer.nnodes x trainer.n_gpus_per_node), which cannot be divided into "
            f"engines of {ROLLOUT}.tensor_model_parallel_size={per_engine}"
        )
    return gpus // per_engine


def _has_vllm(read: MergedConfig) -> bool:
    return read(f"{ROLLOUT}.name") == "vllm"


def lora(key: str, read: MergedConfig) -> object:
    """Return the settings of the adapter; None for rank 0."""
    if not read(key):
        return None
    return {
        "rank": read(key),
        "alpha": read(f"{MODEL}.lora_alpha"),
        "target_modules": read(f"{MODEL}.target_modules"),
        "exclude_modules": read(f"{MODEL}.exclude_modules") or None,
        "target_parameters": read(f"{MODEL}.target_parameters") or [],
    }


def tool_parser(key: str, read: MergedConfig) -> JsonObject:
    """Return the engine's arguments for parsing tool calls."""
    if read(f"{ROLLOUT}.name") == "hf":
        return {"tool_parser": translate(TOOL_PARSERS, read(key))}
    return {"tool_call_parser": vllm_arg(key, read), "enable_auto_tool_choice": True}


def shared_vllm_arg(key: str, read: MergedConfig) -> object:
    """Return an argument of vLLM for which verl's default holds; other engines accept that, or 1."""
    if not _has_vllm(read) and (read(key) == 1 or not read.is_set(key)):
        return UNSET
    return vllm_arg(key, read)


def vllm_args(key: str, read: MergedConfig) -> JsonObject:
    """Return arguments of vLLM."""
    if not isinstance(read(key), dict):
        raise UnsupportedValueError("must be a mapping of vLLM's arguments")
    return vllm_arg(key, read) if read(key) else {}


def vllm_arg(key: str, read: MergedConfig) -> Any:
    """Return an argument of vLLM, after checking that vLLM is the engine."""
    if not _has_vllm(read):
        raise UnsupportedValueError(
            f"is an argument of vLLM, and {ROLLOUT}.name is {read(f'{ROLLOUT}.name')!r}"
        )
    return read(key)


def sleeps(key: str, read: MergedConfig) -> bool:
    """Return True if engines free their memory while learners compute, which only vLLM can, and only if no
    rollout runs meanwhile."""
    return bool(read(key)) and _has_vllm(read) and read("trainer.v1.trainer_mode") == "sync"


def attention(key: str, read: MergedConfig) -> object:
    """Return the attention implementation. Ranks that share sequences have raylight's own."""
    sizes = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    return UNSET if max(read(size) or 1 for size in sizes) > 1 else read(key)


def seed(key: str, read: MergedConfig) -> int | None:
    """Return the seed of the run; None for raylight's default."""
    value = read(key)
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_SEED):
        raise UnsupportedValueError(f"must be a whole number from 0 to {MAX_SEED}")
    return value


def sampling(key: str, read: MergedConfig) -> JsonObject:
    """Return the sampling parameters of agents."""
    value = read(key)
    if isinstance(value, str | bool) or not 0 < value < math.inf:
        raise UnsupportedValueError(
            "must be a number above 0; greedy rollouts of a task are equal and give no signal"
        )
    return {"temperature": float(value)}


def runs_folder(key: str, read: MergedConfig) -> str:
    """Return the folder for the runs of a project, of an experiment, or of an experiment of a project."""
    names = [read(name) for name in ("trainer.project_name", "trainer.experiment_name") if read.is_set(name)]
    return "/".join(["outputs", *map(str, names)])


def trackers(key: str, read: MergedConfig) -> object:
    """Return the trackers of a list of loggers; the console and `metrics.jsonl` always receive metrics."""
    names = [read(key)] if isinstance(read(key), str) else list(read(key))
    keys = {"project": "trainer.project_name", "name": "trainer.experiment_name"}
    run = {argument: str(read(key)) for argument, key in keys.items() if read.is_set(key)}
    trackers = ("wandb" if name == "tracking" else name for name in names)
    return [{"type": name} | run for name in trackers if name not in ("console", "file")] or UNSET
