"""Converters of verl's values. Each takes a key's value and the whole configuration, and returns a setting or NOTHING."""

from __future__ import annotations

import math
from typing import Any

from raylight.algorithms.verl_config.rows import NOTHING, Convert, NotHonouredError, Values

ACTOR, ROLLOUT, MODEL, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))
GROUPED = {
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
}
"""Estimators that compare the rollouts of a task with one another."""
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""verl's names of KL estimators -> ours."""
PARSERS = {"hermes": "hermes", "qwen3_coder": "qwen_xml", "llama3_json": "llama_json"}
"""vLLM's tool parsers -> those of the transformers engine."""


def one_of(**names: Any) -> Convert:
    """A converter that knows a few words."""
    return lambda value, read: _word(names, value)


def _word(names: dict[str, Any], value: Any) -> Any:
    if value not in names:
        raise NotHonouredError(f"must be one of {', '.join(names)}")
    return names[value]


def when(switch: str, then: Convert | None = None) -> Convert:
    """A converter that reads a value only where another key is true."""
    return lambda value, read: NOTHING if not read(switch) else then(value, read) if then else value


def has_critic(read: Values) -> bool:
    """As verl decides it: `critic.enable`, or else whether the estimator is `gae`."""
    enabled = read("critic.enable")
    return read("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def text(value: Any, read: Values) -> str:
    return str(value)


def kl_type(value: Any, read: Values) -> str:
    return _word(KL, value)


def kl_in_reward(value: bool, read: Values) -> float:
    return read("algorithm.kl_ctrl.kl_coef") if value else 0.0


def kl_in_loss(value: bool, read: Values) -> float:
    return read(f"{ACTOR}.kl_loss_coef") if value else 0.0


def kl_target(value: str, read: Values) -> Any:
    """The divergence that an adaptive controller steers to."""
    if not read("algorithm.use_kl_in_reward"):
        return NOTHING
    return _word({"fixed": NOTHING, "adaptive": read("algorithm.kl_ctrl.target_kl")}, value)


def group_size(value: int, read: Values) -> int:
    estimator = read("algorithm.adv_estimator")
    if value < 2 and estimator in GROUPED:
        raise NotHonouredError(
            f"{estimator} compares the rollouts of a task with one another and needs 2 or more of them"
        )
    return value


def zero_variance_groups(value: bool, read: Values) -> str:
    return "drop" if value else "keep"


def rounds(value: int, read: Values) -> int:
    """How often new tasks are rolled out for a step; verl's 0 is without end."""
    if value < 1:
        raise NotHonouredError(
            "lets a step go on for ever; say how often tasks are rolled out for it at most, such as 10"
        )
    return value


def mini_batches(value: int, read: Values) -> int:
    return _mini_batches(value, read, read.given(f"{ACTOR}.ppo_mini_batch_size"))


def critic_mini_batches(value: int, read: Values) -> int:
    return _mini_batches(value, read, read.given("critic.ppo_mini_batch_size"))


def _mini_batches(size: int, read: Values, given: bool) -> int:
    """Into how many parts tasks of a step are dealt; verl's default size may be larger than the batch."""
    batch = read("data.train_batch_size")
    if size >= batch and (size == batch or not given):
        return 1
    if size < 1 or batch % size:
        raise NotHonouredError(f"must divide data.train_batch_size={batch} without a rest")
    return batch // size


def clip_low(value: float, read: Values) -> float:
    """verl's `clip_ratio` stands for both bounds, unless these are given."""
    return _clip("clip_ratio_low", value, read)


def clip_high(value: float, read: Values) -> float:
    return _clip("clip_ratio_high", value, read)


def _clip(name: str, value: float, read: Values) -> float:
    return (
        value
        if read.given(f"{ACTOR}.{name}") or not read.given(f"{ACTOR}.clip_ratio")
        else read(f"{ACTOR}.clip_ratio")
    )


def warmup(value: int | None, read: Values) -> int:
    return _warmup(value, read, f"{ACTOR}.optim.lr_warmup_steps_ratio")


def critic_warmup(value: int | None, read: Values) -> int:
    return _warmup(value, read, "critic.optim.lr_warmup_steps_ratio")


def _warmup(steps: int | None, read: Values, ratio_key: str) -> int:
    """Steps of warm-up: as given, or a share of all steps."""
    if steps is not None and steps > 0:
        return steps
    ratio, total = read(ratio_key), read("trainer.total_training_steps")
    if not ratio:
        return 0
    if total is None:
        raise NotHonouredError(
            f"give lr_warmup_steps, or trainer.total_training_steps of which {ratio_key} is a share"
        )
    return int(ratio * total)


def positive_or_zero(value: int | None, read: Values) -> int:
    """verl's -1 for never."""
    return max(value or 0, 0)


def positive_or_none(value: int | None, read: Values) -> int | None:
    """verl's -1 for never, not even at the end."""
    return positive_or_zero(value, read) or None


def longest(value: Any, read: Values) -> int:
    """Tokens of the longest prompt and response together."""
    return read(f"{ROLLOUT}.max_model_len") or read("data.max_prompt_length") + read(
        "data.max_response_length"
    )


def token_budget(value: int, read: Values) -> int:
    """Tokens of a micro-batch: as given, or so many of the longest rows."""
    most, rows = longest(None, read), read(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if rows and not read(f"{ACTOR}.use_dynamic_bsz"):
        return rows * most
    if not read.given(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        return max(value, most)
    if value < most:
        raise NotHonouredError(
            f"must hold the longest row, which has {most} tokens (data.max_prompt_length + max_response_length)"
        )
    return value


def ranks(value: int, read: Values) -> int:
    return value * read("trainer.nnodes")


def replicas(value: int, read: Values) -> int:
    """Engines that fill all GPUs of the learners, which they share."""
    gpus = value * read("trainer.n_gpus_per_node")
    each = read(f"{ROLLOUT}.tensor_model_parallel_size") if read(f"{ROLLOUT}.name") == "vllm" else 1
    if gpus % each:
        raise NotHonouredError(
            f"{gpus} GPUs (trainer.nnodes x trainer.n_gpus_per_node) cannot be divided into engines of "
            f"{ROLLOUT}.tensor_model_parallel_size={each}"
        )
    return gpus // each


def lora(value: int, read: Values) -> Any:
    """The adapter, where its rank is not 0."""
    if not value:
        return None
    settings = {
        "rank": value,
        "alpha": read(f"{MODEL}.lora_alpha"),
        "target_modules": read(f"{MODEL}.target_modules"),
    }
    return settings | {"exclude_modules": read(f"{MODEL}.exclude_modules") or None}


def engine_kind(value: Any, read: Values) -> str:
    return _word({"vllm": "vllm", "hf": "transformers"}, value)


def tool_parser(value: str, read: Values) -> dict[str, Any]:
    """Arguments that tell the engine how the model writes tool calls."""
    name = read(f"{ROLLOUT}.name")
    if name == "hf":
        return {"tool_parser": _word(PARSERS, value)}
    return vllm_args({"tool_call_parser": value, "enable_auto_tool_choice": True}, read)


def vllm_arg(name: str) -> Convert:
    """An argument of vLLM, which only that has."""

    def convert(value: Any, read: Values) -> Any:
        key = LEFT_TO_VERL.get(name)
        if read(f"{ROLLOUT}.name") != "vllm" and key and (value == 1 or not read.given(f"{ROLLOUT}.{key}")):
            return NOTHING
        return vllm_args({name: value}, read)

    return convert


LEFT_TO_VERL = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_model_parallel_size",
}
"""Arguments of vLLM for which verl's default holds -> verl's names."""


def vllm_args(args: dict[str, Any], read: Values) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise NotHonouredError("must be a mapping of arguments of vLLM")
    if args and read(f"{ROLLOUT}.name") != "vllm":
        raise NotHonouredError(f"is for vLLM, and {ROLLOUT}.name is {read(f'{ROLLOUT}.name')!r}")
    return args


def sleeps(value: bool, read: Values) -> bool:
    return bool(value) and read(f"{ROLLOUT}.name") == "vllm"


def sampling(value: float, read: Values) -> dict[str, Any]:
    """What agents are told to sample with."""
    if isinstance(value, str | bool) or not 0 < value < math.inf:
        raise NotHonouredError(
            "must be a number above 0: rollouts of a task that are all the same teach nothing"
        )
    return {"temperature": float(value)}


def folder(value: str, read: Values) -> str:
    """Where runs of an experiment are collected."""
    return (
        f"outputs/{value}/{read('trainer.experiment_name')}"
        if read.given("trainer.experiment_name")
        else f"outputs/{value}"
    )


def experiment_folder(value: str, read: Values) -> Any:
    return NOTHING if read.given("trainer.project_name") else f"outputs/{value}"


def loggers(value: Any, read: Values) -> Any:
    """Loggers that raylight has not; it always writes to the console and to `metrics.jsonl`."""
    names = [value] if isinstance(value, str) else list(value)
    return tuple(name for name in names if name not in ("console", "file")) or NOTHING
