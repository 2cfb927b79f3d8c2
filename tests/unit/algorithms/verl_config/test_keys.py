"""Each key of verl's configuration changes exactly the settings that its rule names."""

import ast
import functools
from typing import Any

import pytest
from verl_configs import BASE, READ_WITH, difference, settings_of

from raylight.algorithms.verl import VERL
from raylight.algorithms.verl_config import run_settings
from raylight.algorithms.verl_config.keys import KEYS
from raylight.config import LoraConfig
from raylight.errors import ConfigError

A, D, T = "algorithm", "data", "trainer"
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
KL_REWARD = {f"{A}.use_kl_in_reward": True}
KL_LOSS = {f"{ACTOR}.use_kl_loss": True}
IS = {f"{A}.rollout_correction.rollout_is": "token"}
RS = {
    f"{A}.rollout_correction.rollout_rs": "seq_mean_k1",
    f"{A}.rollout_correction.rollout_rs_threshold": "0.5_2.0",
}
LORA = {f"{MODEL}.lora_rank": 8}
PPO = {f"{A}.adv_estimator": "gae"}
STEPS = {f"{T}.total_training_steps": 50}
EIGHT = {f"{T}.n_gpus_per_node": 8}
ASYNC = {f"{T}.v1.trainer_mode": "colocate_async"}

# key, its value, settings that it changes, configuration that it needs
CHANGES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    (
        f"{T}.v1.trainer_mode",
        "separate_async",
        {"algorithm.max_staleness": 7, "algorithm.stale": "drop"},
        {f"{ROLLOUT}.free_cache_engine": False},
    ),
    (f"{T}.v1.sampler.max_off_policy_threshold", 3, {"algorithm.max_staleness": 2}, ASYNC),
    (f"{T}.v1.sampler.max_off_policy_strategy", "wait", {"algorithm.stale": "wait"}, ASYNC),
    (f"{A}.adv_estimator", "rloo", {"algorithm.adv_estimator": "rloo"}, {}),
    (f"{A}.off_policy_sampling", "mask", {"algorithm.off_policy_sampling": "mask"}, {}),
    (f"{A}.override_sampling", True, {"algorithm.override_sampling": True}, {}),
    (f"{A}.gamma", 0.9, {"algorithm.gamma": 0.9}, {}),
    (f"{A}.lam", 0.95, {"algorithm.lam": 0.95}, {}),
    (f"{A}.norm_adv_by_std_in_grpo", False, {"algorithm.norm_adv_by_std": False}, {}),
    (f"{A}.use_kl_in_reward", True, {"algorithm.kl_reward_coef": 0.001}, {}),
    (f"{A}.kl_penalty", "low_var_kl", {"algorithm.kl_reward_type": "k3"}, KL_REWARD),
    (f"{A}.kl_ctrl.kl_coef", 0.05, {"algorithm.kl_reward_coef": 0.05}, KL_REWARD),
    (f"{A}.kl_ctrl.type", "adaptive", {"algorithm.kl_target": 0.1}, KL_REWARD),
    (
        f"{A}.kl_ctrl.target_kl",
        6.0,
        {"algorithm.kl_target": 6.0},
        KL_REWARD | {f"{A}.kl_ctrl.type": "adaptive"},
    ),
    (f"{A}.kl_ctrl.horizon", 500, {"algorithm.kl_horizon": 500}, KL_REWARD),
    (f"{A}.rollout_correction.rollout_is", "token", {"algorithm.rollout_is": "token"}, {}),
    (f"{A}.rollout_correction.rollout_is_threshold", 3.0, {"algorithm.rollout_is_threshold": 3.0}, IS),
    (
        f"{A}.rollout_correction.rollout_is_batch_normalize",
        True,
        {"algorithm.rollout_is_batch_normalize": True},
        IS,
    ),
    (f"{A}.rollout_correction.rollout_rs", "token_k1", {"algorithm.rollout_rs": "token_k1"}, RS),
    (
        f"{A}.rollout_correction.rollout_rs_threshold",
        "0.4_2.5",
        {"algorithm.rollout_rs_threshold": "0.4_2.5"},
        RS,
    ),
    (f"{A}.rollout_correction.bypass_mode", True, {"algorithm.bypass_mode": True}, {}),
    (
        f"{A}.filter_groups.enable",
        True,
        {"algorithm.zero_variance_groups": "drop", "algorithm.max_rounds": 5},
        {f"{A}.filter_groups.max_num_gen_batches": 5},
    ),
    (
        f"{A}.filter_groups.max_num_gen_batches",
        7,
        {"algorithm.max_rounds": 7},
        {f"{A}.filter_groups.enable": True, f"{A}.filter_groups.max_num_gen_batches": 5},
    ),
    (f"{D}.train_batch_size", 16, {"algorithm.tasks_per_step": 16}, {}),
    (f"{D}.max_prompt_length", 1000, {"engine.max_model_len": 1512}, {}),
    (f"{D}.max_response_length", 100, {"engine.max_model_len": 612}, {}),
    (f"{ROLLOUT}.max_model_len", 4096, {"engine.max_model_len": 4096}, {}),
    (f"{D}.seed", 7, {"run.seed": 7}, {}),
    (f"{ROLLOUT}.seed", 7, {"run.seed": 7}, {}),
    (f"{ACTOR}.ppo_mini_batch_size", 4, {"algorithm.mini_batches": 2}, {}),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", 20000, {"learner.max_tokens_per_micro_batch": 20000}, {}),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2, {"learner.max_tokens_per_micro_batch": 2048}, {}),
    (
        f"{ACTOR}.use_dynamic_bsz",
        True,
        {"learner.max_tokens_per_micro_batch": 16384},
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2},
    ),
    (f"{ACTOR}.ppo_epochs", 3, {"algorithm.ppo_epochs": 3}, {}),
    (f"{ACTOR}.clip_ratio", 0.1, {"algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.1}, {}),
    (f"{ACTOR}.clip_ratio_low", 0.1, {"algorithm.clip_ratio_low": 0.1}, {}),
    (f"{ACTOR}.clip_ratio_high", 0.28, {"algorithm.clip_ratio_high": 0.28}, {}),
    (f"{ACTOR}.clip_ratio_c", 10.0, {"algorithm.clip_ratio_c": 10.0}, {}),
    (f"{ACTOR}.tau_pos", 1.1, {"algorithm.tau_pos": 1.1}, {}),
    (f"{ACTOR}.tau_neg", 1.2, {"algorithm.tau_neg": 1.2}, {}),
    (f"{ACTOR}.policy_loss.loss_mode", "gspo", {"algorithm.loss_mode": "gspo"}, {}),
    (f"{ACTOR}.policy_loss.clip_cov_ratio", 0.01, {"algorithm.clip_cov_ratio": 0.01}, {}),
    (f"{ACTOR}.policy_loss.clip_cov_lb", 2.0, {"algorithm.clip_cov_lb": 2.0}, {}),
    (f"{ACTOR}.policy_loss.clip_cov_ub", 6.0, {"algorithm.clip_cov_ub": 6.0}, {}),
    (f"{ACTOR}.policy_loss.kl_cov_ratio", 0.01, {"algorithm.kl_cov_ratio": 0.01}, {}),
    (f"{ACTOR}.policy_loss.ppo_kl_coef", 0.2, {"algorithm.ppo_kl_coef": 0.2}, {}),
    (f"{ACTOR}.policy_loss.dro_beta", 0.1, {"algorithm.dro_beta": 0.1}, {}),
    (
        f"{A}.gdpo_reward_keys",
        ["right", "short"],
        {"algorithm.reward_weights": {"right": 1.0, "short": 1.0}},
        {},
    ),
    (
        f"{A}.gdpo_reward_weights",
        [1.0, 0.5],
        {"algorithm.reward_weights": {"right": 1.0, "short": 0.5}},
        {f"{A}.gdpo_reward_keys": ["right", "short"]},
    ),
    (f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean", {"algorithm.loss_agg_mode": "seq-mean-token-mean"}, {}),
    (
        f"{ACTOR}.loss_scale_factor",
        512,
        {"algorithm.loss_scale_factor": 512},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
    ),
    (f"{ACTOR}.entropy_coeff", 0.01, {"algorithm.entropy_coef": 0.01}, {}),
    (f"{ACTOR}.calculate_entropy", False, {"algorithm.calculate_entropy": False}, {}),
    (f"{ACTOR}.use_kl_loss", True, {"algorithm.kl_coef": 0.001}, {}),
    (f"{ACTOR}.kl_loss_coef", 0.02, {"algorithm.kl_coef": 0.02}, KL_LOSS),
    (f"{ACTOR}.kl_loss_type", "mse", {"algorithm.kl_type": "k2"}, KL_LOSS),
    (f"{ACTOR}.grad_clip", 0.5, {"algorithm.grad_clip": 0.5}, {}),
    (f"{ACTOR}.optim.clip_grad", 0.5, {"algorithm.grad_clip": 0.5}, {}),
    (f"{ACTOR}.optim.lr", 3e-5, {"algorithm.lr": 3e-5}, {}),
    (f"{ACTOR}.optim.lr_warmup_steps", 5, {"algorithm.lr_warmup_steps": 5}, {}),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.1, {"algorithm.lr_warmup_steps": 5}, STEPS),
    (f"{ACTOR}.optim.lr_scheduler_type", "cosine", {"algorithm.lr_schedule": "cosine"}, {}),
    (f"{ACTOR}.optim.warmup_style", "cosine", {"algorithm.lr_schedule": "cosine"}, {}),
    (
        f"{ACTOR}.optim.min_lr_ratio",
        0.1,
        {"algorithm.min_lr_ratio": 0.1},
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine"},
    ),
    (f"{ACTOR}.optim.weight_decay", 0.1, {"algorithm.weight_decay": 0.1}, {}),
    (f"{ACTOR}.optim.betas", [0.9, 0.95], {"algorithm.betas": (0.9, 0.95)}, {}),
    (f"{ACTOR}.fsdp_config.param_offload", True, {"learner.param_offload": True}, {}),
    (f"{ACTOR}.fsdp_config.optimizer_offload", True, {"learner.optimizer_offload": True}, {}),
    (f"{ACTOR}.fsdp_config.dtype", "float32", {"learner.dtype": "float32"}, {}),
    (f"{ACTOR}.ulysses_sequence_parallel_size", 2, {"learner.ulysses": 2}, EIGHT),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 4, {"learner.ulysses": 4}, EIGHT),
    (f"{ACTOR}.fsdp_config.fsdp_size", 4, {"learner.fsdp_size": 4}, EIGHT),
    (f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation", True, {"learner.no_sync": True}, {}),
    (f"{ACTOR}.use_torch_compile", True, {"learner.torch_compile": True}, {}),
    (f"{ACTOR}.fsdp_config.use_torch_compile", True, {"learner.torch_compile": True}, {}),
    (f"{MODEL}.path", "models/other", {"algorithm.model": "models/other"}, {}),
    (
        f"{MODEL}.lora_rank",
        8,
        {"learner.lora": LoraConfig(rank=8, alpha=16, target_modules="all-linear")},
        {},
    ),
    (f"{MODEL}.lora_alpha", 32, {"learner.lora": LoraConfig(rank=8, alpha=32)}, LORA),
    (
        f"{MODEL}.target_modules",
        ["q_proj"],
        {"learner.lora": LoraConfig(rank=8, alpha=16, target_modules=["q_proj"])},
        LORA,
    ),
    (
        f"{MODEL}.exclude_modules",
        ["v_proj"],
        {"learner.lora": LoraConfig(rank=8, alpha=16, exclude_modules=["v_proj"])},
        LORA,
    ),
    (
        f"{MODEL}.target_parameters",
        ["mlp.experts.down_proj"],
        {"learner.lora": LoraConfig(rank=8, alpha=16, target_parameters=["mlp.experts.down_proj"])},
        LORA,
    ),
    (f"{MODEL}.enable_gradient_checkpointing", False, {"learner.gradient_checkpointing": False}, {}),
    (f"{MODEL}.use_remove_padding", False, {"learner.packed": False}, {}),
    (f"{MODEL}.override_config.attn_implementation", "sdpa", {"learner.attention": "sdpa"}, {}),
    (f"{ROLLOUT}.n", 6, {"algorithm.group_size": 6}, {}),
    (f"{ROLLOUT}.val_kwargs.n", 3, {"algorithm.val_samples": 3}, {}),
    (f"{ROLLOUT}.temperature", 0.7, {"algorithm.sampling_parameters": {"temperature": 0.7}}, {}),
    (f"{ROLLOUT}.max_num_seqs", 64, {"engine.max_concurrent": 64}, {}),
    (f"{ROLLOUT}.dtype", "float16", {"engine.dtype": "float16"}, {}),
    (
        f"{ROLLOUT}.free_cache_engine",
        True,
        {"engine.sleep_while_learning": True, "engine.args.enable_sleep_mode": True},
        {f"{ROLLOUT}.free_cache_engine": False},
    ),
    (
        f"{ROLLOUT}.tensor_model_parallel_size",
        4,
        {"engine.args.tensor_parallel_size": 4, "engine.replicas": 2},
        EIGHT,
    ),
    (f"{ROLLOUT}.gpu_memory_utilization", 0.8, {"engine.args.gpu_memory_utilization": 0.8}, {}),
    (f"{ROLLOUT}.enforce_eager", True, {"engine.args.enforce_eager": True}, {}),
    (f"{ROLLOUT}.max_num_batched_tokens", 4096, {"engine.args.max_num_batched_tokens": 4096}, {}),
    (f"{ROLLOUT}.enable_chunked_prefill", False, {"engine.args.enable_chunked_prefill": False}, {}),
    (f"{ROLLOUT}.enable_prefix_caching", False, {"engine.args.enable_prefix_caching": False}, {}),
    (f"{ROLLOUT}.disable_log_stats", False, {"engine.args.disable_log_stats": False}, {}),
    (f"{ROLLOUT}.quantization", "fp8", {"engine.args.quantization": "fp8"}, {}),
    (f"{ROLLOUT}.engine_kwargs.vllm", {"swap_space": 2}, {"engine.args.swap_space": 2}, {}),
    (
        f"{ROLLOUT}.multi_turn.format",
        "llama3_json",
        {"engine.args.tool_call_parser": "llama3_json", "engine.args.enable_auto_tool_choice": True},
        {},
    ),
    ("critic.enable", True, {}, PPO),
    ("critic.optim.lr", 2e-5, {"critic.lr": 2e-5}, PPO),
    ("critic.optim.lr_warmup_steps", 4, {"critic.lr_warmup_steps": 4}, PPO),
    ("critic.optim.lr_warmup_steps_ratio", 0.2, {"critic.lr_warmup_steps": 10}, PPO | STEPS),
    ("critic.optim.lr_scheduler_type", "cosine", {"critic.lr_schedule": "cosine"}, PPO),
    (
        "critic.optim.min_lr_ratio",
        0.2,
        {"critic.min_lr_ratio": 0.2},
        PPO | {"critic.optim.lr_scheduler_type": "cosine"},
    ),
    ("critic.optim.weight_decay", 0.2, {"critic.weight_decay": 0.2}, PPO),
    ("critic.optim.betas", [0.8, 0.9], {"critic.betas": (0.8, 0.9)}, PPO),
    ("critic.grad_clip", 0.3, {"critic.grad_clip": 0.3}, PPO),
    ("critic.optim.clip_grad", 0.3, {"critic.grad_clip": 0.3}, PPO),
    ("critic.model.path", "models/value", {"critic.model": "models/value"}, PPO),
    ("critic.ppo_mini_batch_size", 2, {"critic.mini_batches": 4}, PPO),
    ("critic.ppo_epochs", 2, {"critic.ppo_epochs": 2}, PPO),
    ("critic.cliprange_value", 0.3, {"critic.cliprange_value": 0.3}, PPO),
    ("critic.loss_agg_mode", "token-sum", {"critic.loss_agg_mode": "token-sum"}, PPO),
    (f"{T}.critic_warmup", 3, {"critic.warmup_steps": 3}, PPO),
    (f"{T}.n_gpus_per_node", 4, {"learner.n": 4, "engine.replicas": 4}, {}),
    (f"{T}.nnodes", 2, {"learner.n": 2, "engine.replicas": 2}, {}),
    (f"{T}.device", "cuda", {"run.cpu_fallback": False}, {}),
    (f"{T}.total_epochs", 5, {"algorithm.n_epochs": 5}, {}),
    (f"{T}.total_training_steps", 12, {"algorithm.n_steps": 12}, {}),
    (f"{T}.test_freq", 4, {"algorithm.val_every": 4}, {}),
    (f"{T}.test_freq", -1, {"algorithm.val_every": None}, {f"{T}.test_freq": 2}),
    (f"{T}.val_before_train", False, {"algorithm.val_before_train": False}, {}),
    (f"{T}.save_freq", 16, {"checkpoint.every": 16}, {}),
    (f"{T}.max_actor_ckpt_to_keep", 3, {"checkpoint.keep": 3}, {}),
    (f"{T}.default_local_dir", "runs/mine", {"run.output_dir": "runs/mine"}, {}),
    (f"{T}.project_name", "mine", {"run.outputs": "outputs/mine"}, {}),
    (f"{T}.experiment_name", "one", {"run.outputs": "outputs/one"}, {}),
    (f"{T}.experiment_name", 7, {"run.outputs": "outputs/7"}, {}),
]
TESTED_ELSEWHERE = {f"{ROLLOUT}.name", f"{T}.logger"}
"""Keys with separate tests."""


@pytest.fixture(autouse=True)
def pretend_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "has_vllm", lambda: True)


@functools.cache
def settings_before(config: str) -> dict[str, Any]:
    return settings_of(ast.literal_eval(config))


@pytest.mark.parametrize(
    ("key", "value", "changes", "before"), CHANGES, ids=[f"{key}={value}" for key, value, *_ in CHANGES]
)
def test_a_key_changes_exactly_its_settings(
    key: str, value: Any, changes: dict[str, Any], before: dict[str, Any]
) -> None:
    base = BASE | before
    assert difference(settings_before(repr(base)), settings_of(base | {key: value})) == changes


def test_every_key_that_is_read_has_a_row_above() -> None:
    read = {key for key, rule in KEYS.items() if rule.target} | READ_WITH.keys()
    assert read - TESTED_ELSEWHERE == {key for key, *_ in CHANGES}


def test_rules_name_keys_that_exist() -> None:
    for key, rule in KEYS.items():
        assert not set(rule.reads) - KEYS.keys(), key
        assert rule.target or rule.reason or key in READ_WITH, key


def test_ignored_keys_accept_any_value() -> None:
    ignored = {key: 3 for key, rule in KEYS.items() if rule.reason and rule.accepted is None}
    assert len(ignored) > 30
    assert settings_of(BASE | ignored) == settings_of(BASE)


ACCEPTED = {key: rule.accepted for key, rule in KEYS.items() if rule.accepted is not None}


def test_accepted_values_change_nothing() -> None:
    for pick in (0, -1):
        config = BASE | {key: values[pick] for key, values in ACCEPTED.items()}
        assert settings_of(config) == settings_of(BASE)


def test_any_other_value_of_such_a_key_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        VERL(BASE | dict.fromkeys(ACCEPTED, "something else"))
    for key in ACCEPTED:
        expected = f"{key}='something else' is not supported: {KEYS[key].reason}; remove it, or set it to "
        assert expected in str(error.value)


def test_verls_default_does_not_hold_for_an_unset_key_with_an_own_default() -> None:
    """The defaults of verl would compile, choose a tool parser regardless of the model, or name a folder
    after an example."""
    settings = VERL(BASE)._resolution.settings
    own_defaults = {key for key, rule in KEYS.items() if rule.own_default}
    assert not own_defaults & {setting.key for setting in settings.values()}
