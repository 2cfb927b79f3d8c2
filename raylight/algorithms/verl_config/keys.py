"""Table of verl's keys that raylight supports. Any other key is an error.

`maps_to` names the setting that a key sets. The value of a `used_by` key is read by another key's rule.
`only` lists the values that match raylight's behaviour. `ignored` keys have no effect. A setting of the
critic is made only if there is a critic. A key that is not set has verl's default, except in rules with
`own_default`.
"""

from __future__ import annotations

from raylight.algorithms.verl_config import converters as c
from raylight.algorithms.verl_config.key_rules import KeyRule, by_full_key, ignored, maps_to, only, used_by

ACTOR, ROLLOUT, MODEL, REF = c.ACTOR, c.ROLLOUT, c.MODEL, c.REF
FORWARD = "affects memory only: forward passes use the budget of training, learner.max_tokens_per_micro_batch"
CHUNKS = "log-probs and entropies are always computed in chunks"
ROWS = "calls that extend the same tokens become one row, and statistics are over rollouts"
ROW_LIMIT = "a row has at most data.max_prompt_length + max_response_length tokens"
TRUNCATED = (
    "verl trains as if it had not truncated; an agent whose own requests have top_p or top_k is trained on "
    "the distribution that it samples from"
)
DATASETS = "datasets are arguments of Trainer.fit"

_ALGORITHM = (
    maps_to("adv_estimator", "algorithm.adv_estimator"),
    maps_to("gamma", "algorithm.gamma"),
    maps_to("lam", "algorithm.lam"),
    maps_to("norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std"),
    maps_to(
        "gdpo_reward_keys", "algorithm.reward_weights", c.reward_weights, reads=(".gdpo_reward_weights",)
    ),
    used_by("gdpo_reward_weights", ".gdpo_reward_keys"),
    maps_to("use_kl_in_reward", "algorithm.kl_reward_coef", c.kl_in_reward, reads=(".kl_ctrl.kl_coef",)),
    maps_to("kl_penalty", "algorithm.kl_reward_type", c.if_enabled("algorithm.use_kl_in_reward", c.kl_type)),
    used_by("kl_ctrl.kl_coef", ".use_kl_in_reward"),
    maps_to("kl_ctrl.type", "algorithm.kl_target", c.kl_target, reads=(".kl_ctrl.target_kl",)),
    used_by("kl_ctrl.target_kl", ".kl_ctrl.type"),
    maps_to("kl_ctrl.horizon", "algorithm.kl_horizon", c.if_enabled("algorithm.use_kl_in_reward")),
    maps_to("rollout_correction.rollout_is", "algorithm.rollout_is", own_default=True),
    maps_to(
        "rollout_correction.rollout_is_threshold",
        "algorithm.rollout_is_threshold",
        c.if_enabled("algorithm.rollout_correction.rollout_is"),
    ),
    maps_to(
        "rollout_correction.rollout_is_batch_normalize",
        "algorithm.rollout_is_batch_normalize",
        c.if_enabled("algorithm.rollout_correction.rollout_is"),
    ),
    maps_to("rollout_correction.rollout_rs", "algorithm.rollout_rs"),
    maps_to(
        "rollout_correction.rollout_rs_threshold",
        "algorithm.rollout_rs_threshold",
        c.if_enabled("algorithm.rollout_correction.rollout_rs"),
    ),
    maps_to("rollout_correction.bypass_mode", "algorithm.bypass_mode"),
    only("rollout_correction.loss_type", "ppo_clip", reason="actor.policy_loss.loss_mode selects the loss"),
    maps_to("filter_groups.enable", "algorithm.zero_variance_groups", c.zero_variance_groups),
    maps_to(
        "filter_groups.max_num_gen_batches",
        "algorithm.max_rounds",
        c.if_enabled("algorithm.filter_groups.enable", c.rounds),
    ),
    only(
        "filter_groups.metric",
        "reward",
        "score",
        "seq_reward",
        "seq_final_reward",
        reason="groups are filtered by their rewards",
    ),
    only("use_pf_ppo", False, reason="rollouts are not resampled by reward"),
    maps_to("off_policy_sampling", "algorithm.off_policy_sampling", own_default=True),
    maps_to("override_sampling", "algorithm.override_sampling", own_default=True),
)

_DATA = (
    maps_to("train_batch_size", "algorithm.tasks_per_step"),
    maps_to(
        "max_prompt_length",
        "engine.max_model_len",
        c.longest_row,
        reads=(".max_response_length", f"{ROLLOUT}.max_model_len"),
    ),
    used_by("max_response_length", ".max_prompt_length"),
    maps_to("seed", "run.seed", c.seed, own_default=True),
    ignored("train_files", DATASETS),
    ignored("val_files", DATASETS),
    ignored("val_batch_size", "all validation tasks are rolled out together"),
    ignored("dataloader_num_workers", DATASETS),
    only("gen_batch_size", None, reason="a step rolls out data.train_batch_size tasks"),
    only("shuffle", True, reason="every epoch is shuffled"),
    only(
        "truncation",
        "error",
        reason="a row above the learner's limit is an error; prompts are never truncated",
    ),
    only(
        "filter_overlong_prompts",
        False,
        reason="the engine rejects a prompt that is too long, and the rollout fails",
    ),
    only("train_max_samples", -1, reason="all tasks are used"),
    only("val_max_samples", -1, reason="all tasks are used"),
    only("trust_remote_code", False, reason="code in the model's folder is never run"),
)

_ACTOR = (
    only("strategy", "fsdp", "fsdp2", reason="FSDP2 is the training engine"),
    maps_to(
        "ppo_mini_batch_size", "algorithm.mini_batches", c.mini_batches, reads=("data.train_batch_size",)
    ),
    maps_to(
        "ppo_max_token_len_per_gpu",
        "learner.max_tokens_per_micro_batch",
        c.token_budget,
        reads=(
            ".ppo_micro_batch_size_per_gpu",
            ".use_dynamic_bsz",
            "data.max_prompt_length",
            "data.max_response_length",
        ),
    ),
    used_by("ppo_micro_batch_size_per_gpu", ".ppo_max_token_len_per_gpu"),
    used_by("use_dynamic_bsz", ".ppo_max_token_len_per_gpu"),
    maps_to("ppo_epochs", "algorithm.ppo_epochs"),
    only("shuffle", False, reason="rollouts are split into mini-batches in their order"),
    used_by("clip_ratio", ".clip_ratio_low"),
    maps_to("clip_ratio_low", "algorithm.clip_ratio_low", c.clip_low, reads=(".clip_ratio",)),
    maps_to("clip_ratio_high", "algorithm.clip_ratio_high", c.clip_high, reads=(".clip_ratio",)),
    maps_to("clip_ratio_c", "algorithm.clip_ratio_c"),
    maps_to("tau_pos", "algorithm.tau_pos"),
    maps_to("tau_neg", "algorithm.tau_neg"),
    maps_to("policy_loss.loss_mode", "algorithm.loss_mode"),
    maps_to("policy_loss.clip_cov_ratio", "algorithm.clip_cov_ratio"),
    maps_to("policy_loss.clip_cov_lb", "algorithm.clip_cov_lb"),
    maps_to("policy_loss.clip_cov_ub", "algorithm.clip_cov_ub"),
    maps_to("policy_loss.kl_cov_ratio", "algorithm.kl_cov_ratio"),
    maps_to("policy_loss.ppo_kl_coef", "algorithm.ppo_kl_coef"),
    maps_to("policy_loss.dro_beta", "algorithm.dro_beta"),
    maps_to("loss_agg_mode", "algorithm.loss_agg_mode"),
    maps_to("loss_scale_factor", "algorithm.loss_scale_factor"),
    maps_to("entropy_coeff", "algorithm.entropy_coef"),
    maps_to("calculate_entropy", "algorithm.calculate_entropy", own_default=True),
    maps_to("use_kl_loss", "algorithm.kl_coef", c.kl_in_loss, reads=(".kl_loss_coef",)),
    used_by("kl_loss_coef", ".use_kl_loss"),
    maps_to("kl_loss_type", "algorithm.kl_type", c.if_enabled(f"{ACTOR}.use_kl_loss", c.kl_type)),
    maps_to("grad_clip", "algorithm.grad_clip"),
    maps_to("optim.clip_grad", "algorithm.grad_clip"),
    maps_to("optim.lr", "algorithm.lr"),
    maps_to(
        "optim.lr_warmup_steps",
        "algorithm.lr_warmup_steps",
        c.warmup,
        reads=(".optim.lr_warmup_steps_ratio", "trainer.total_training_steps"),
    ),
    used_by("optim.lr_warmup_steps_ratio", ".optim.lr_warmup_steps"),
    maps_to("optim.lr_scheduler_type", "algorithm.lr_schedule"),
    maps_to("optim.warmup_style", "algorithm.lr_schedule", own_default=True),
    maps_to("optim.min_lr_ratio", "algorithm.min_lr_ratio"),
    maps_to("optim.weight_decay", "algorithm.weight_decay"),
    maps_to("optim.betas", "algorithm.betas"),
    only("optim.optimizer", "AdamW", reason="the optimizer is AdamW"),
    only("optim.optimizer_impl", "torch.optim", reason="the optimizer is PyTorch's"),
    only("optim.num_cycles", 0.5, reason="the cosine schedule has half a period"),
    only("optim.total_training_steps", -1, reason="trainer.total_training_steps sets the length of training"),
    maps_to("fsdp_config.param_offload", "learner.param_offload"),
    maps_to("fsdp_config.optimizer_offload", "learner.optimizer_offload"),
    maps_to(
        "fsdp_config.dtype",
        "learner.dtype",
        c.one_of(bfloat16="bfloat16", bf16="bfloat16", float32="float32", fp32="float32"),
    ),
    only("fsdp_config.model_dtype", "fp32", "float32", reason="trained parameters are stored in float32"),
    only("fsdp_config.strategy", "fsdp", "fsdp2", reason="FSDP2 is the training engine"),
    maps_to(
        "fsdp_config.fsdp_size",
        "learner.fsdp_size",
        c.shard_size,
        reads=("trainer.n_gpus_per_node", "trainer.nnodes"),
    ),
    maps_to("fsdp_config.use_no_sync_for_gradient_accumulation", "learner.no_sync"),
    ignored("entropy_from_logits_with_chunking", CHUNKS),
    ignored("entropy_from_logits_chunk_size", CHUNKS),
    ignored("entropy_checkpointing", CHUNKS),
    ignored("fsdp_config.reshard_after_forward", "affects memory only: FSDP2 reshards"),
    ignored("fsdp_config.forward_prefetch", "affects speed only"),
    ignored("fsdp_config.wrap_policy", "FSDP2 wraps the model's own layers"),
    maps_to("ulysses_sequence_parallel_size", "learner.ulysses"),
    maps_to("fsdp_config.ulysses_sequence_parallel_size", "learner.ulysses"),
    maps_to("use_torch_compile", "learner.torch_compile", own_default=True),
    maps_to("fsdp_config.use_torch_compile", "learner.torch_compile", own_default=True),
    ignored(
        "checkpoint.save_contents",
        "a training state is always complete, with the model next to it in Hugging Face format",
    ),
    ignored("checkpoint.load_contents", "a training state is always loaded completely"),
)

_MODEL = (
    maps_to("path", "algorithm.model", c.text),
    maps_to(
        "lora_rank",
        "learner.lora",
        c.lora,
        reads=(".lora_alpha", ".target_modules", ".exclude_modules", ".target_parameters"),
    ),
    used_by("lora_alpha", ".lora_rank"),
    used_by("target_modules", ".lora_rank"),
    used_by("exclude_modules", ".lora_rank"),
    used_by("target_parameters", ".lora_rank"),
    maps_to("enable_gradient_checkpointing", "learner.gradient_checkpointing"),
    maps_to("use_remove_padding", "learner.packed"),
    maps_to("override_config.attn_implementation", "learner.attention", c.attention, own_default=True),
    ignored("use_shm", "the model is read from disk only once"),
    only("trust_remote_code", False, reason="code in the model's folder is never run"),
    only("enable_activation_offload", False, reason="activations are recomputed or kept, never offloaded"),
    only("use_liger", False, reason="layers are transformers' own"),
    ignored("use_fused_kernels", CHUNKS),
)

_REF = (
    ignored("fsdp_config.param_offload", "affects memory only: same as actor.fsdp_config.param_offload"),
    ignored("log_prob_micro_batch_size", FORWARD),
    ignored("log_prob_micro_batch_size_per_gpu", FORWARD),
    ignored("log_prob_use_dynamic_bsz", FORWARD),
    ignored("log_prob_max_token_len_per_gpu", FORWARD),
    only("strategy", "fsdp", "fsdp2", reason="FSDP2 is the training engine"),
)

_ROLLOUT = (
    maps_to("name", "engine.kind", c.engine_kind),
    maps_to("n", "algorithm.group_size", c.group_size, reads=("algorithm.adv_estimator",)),
    maps_to("val_kwargs.n", "algorithm.val_samples"),
    maps_to("temperature", "algorithm.sampling_parameters", c.sampling),
    used_by("max_model_len", "data.max_prompt_length"),
    maps_to("max_num_seqs", "engine.max_concurrent"),
    maps_to(
        "dtype",
        "engine.dtype",
        c.one_of(bfloat16="bfloat16", float16="float16", half="float16", float32="float32"),
    ),
    maps_to("free_cache_engine", "engine.sleep_while_learning", c.sleeps),
    maps_to("tensor_model_parallel_size", "engine.args", c.vllm_arg("tensor_parallel_size")),
    maps_to("gpu_memory_utilization", "engine.args", c.vllm_arg("gpu_memory_utilization")),
    maps_to("enforce_eager", "engine.args", c.vllm_arg("enforce_eager"), own_default=True),
    maps_to("max_num_batched_tokens", "engine.args", c.vllm_arg("max_num_batched_tokens"), own_default=True),
    maps_to("enable_chunked_prefill", "engine.args", c.vllm_arg("enable_chunked_prefill"), own_default=True),
    maps_to("enable_prefix_caching", "engine.args", c.vllm_arg("enable_prefix_caching"), own_default=True),
    maps_to("disable_log_stats", "engine.args", c.vllm_arg("disable_log_stats"), own_default=True),
    maps_to("quantization", "engine.args", c.vllm_arg("quantization"), own_default=True),
    maps_to("engine_kwargs.vllm", "engine.args", c.vllm_args),
    maps_to("multi_turn.format", "engine.args", c.tool_parser, own_default=True),
    maps_to("seed", "run.seed", c.seed, own_default=True),
    ignored("multi_turn.enable", "the agent decides how many turns it takes"),
    ignored("val_kwargs.do_sample", "the agent decides how it samples"),
    ignored(
        "val_kwargs.temperature",
        "validation uses the temperature of training, as in agent-lightning",
    ),
    ignored("load_format", "engines load the model, then receive the learners' weights"),
    ignored("layered_summon", "affects memory only: how weights are collected"),
    ignored("calculate_log_probs", "log-probs are always recorded"),
    ignored("log_prob_micro_batch_size", FORWARD),
    ignored("log_prob_micro_batch_size_per_gpu", FORWARD),
    ignored("log_prob_use_dynamic_bsz", FORWARD),
    ignored("log_prob_max_token_len_per_gpu", FORWARD),
    ignored("agent.num_workers", "agents run in the Trainer's runners"),
    ignored("agent.custom_async_server.path", "raylight serves the model itself"),
    ignored("agent.custom_async_server.name", "raylight serves the model itself"),
    ignored("trace_aggregator.special_token_tolerance", "calls are merged only if their tokens are equal"),
    ignored("trace_aggregator.string_tolerance", "calls are merged only if their tokens are equal"),
    ignored("trace_aggregator.trajectory_max_prompt_length", ROW_LIMIT),
    ignored("trace_aggregator.trajectory_max_response_length", ROW_LIMIT),
    only("trace_aggregator.mode", "transition", "trajectory", "trajectory-strict", reason=ROWS),
    only("mode", "async", reason="agents call the engine over HTTP"),
    only("top_p", 1, 1.0, reason=TRUNCATED),
    only("top_k", -1, 0, reason=TRUNCATED),
    only("do_sample", True, reason="the agent decides how it samples"),
    only("ignore_eos", False, reason="a response ends where the model ends it"),
    only(
        "logprobs_mode",
        "processed_logprobs",
        reason="log-probs are of the distribution that was sampled from",
    ),
    only("data_parallel_size", 1, reason="there is one engine per tensor_model_parallel_size GPUs"),
    only("pipeline_model_parallel_size", 1, reason="an engine runs on one node"),
    only("expert_parallel_size", 1, reason="an engine runs on one node"),
)

_CRITIC = (
    used_by("enable", "algorithm.adv_estimator"),
    maps_to("optim.lr", "critic.lr"),
    maps_to(
        "optim.lr_warmup_steps",
        "critic.lr_warmup_steps",
        c.critic_warmup,
        reads=(".optim.lr_warmup_steps_ratio", "trainer.total_training_steps"),
    ),
    used_by("optim.lr_warmup_steps_ratio", ".optim.lr_warmup_steps"),
    maps_to("optim.lr_scheduler_type", "critic.lr_schedule"),
    maps_to("optim.min_lr_ratio", "critic.min_lr_ratio"),
    maps_to("optim.weight_decay", "critic.weight_decay"),
    maps_to("optim.betas", "critic.betas"),
    maps_to("grad_clip", "critic.grad_clip"),
    maps_to("optim.clip_grad", "critic.grad_clip"),
    maps_to("model.path", "critic.model", own_default=True),
    maps_to(
        "ppo_mini_batch_size", "critic.mini_batches", c.critic_mini_batches, reads=("data.train_batch_size",)
    ),
    maps_to("ppo_epochs", "critic.ppo_epochs"),
    maps_to("cliprange_value", "critic.cliprange_value"),
    maps_to("loss_agg_mode", "critic.loss_agg_mode"),
    only("strategy", "fsdp", "fsdp2", reason="FSDP2 is the training engine"),
    ignored("ppo_micro_batch_size_per_gpu", FORWARD),
    ignored("forward_micro_batch_size_per_gpu", FORWARD),
    ignored("use_dynamic_bsz", FORWARD),
    ignored("ppo_max_token_len_per_gpu", FORWARD),
    ignored("forward_max_token_len_per_gpu", FORWARD),
    ignored("fsdp.param_offload", "affects memory only: same as actor.fsdp_config.param_offload"),
    ignored("fsdp.optimizer_offload", "affects memory only: same as actor.fsdp_config.optimizer_offload"),
    ignored(
        "model.use_remove_padding", "affects speed only: same as actor_rollout_ref.model.use_remove_padding"
    ),
    ignored(
        "model.enable_gradient_checkpointing",
        "affects memory only: same as actor_rollout_ref.model.enable_gradient_checkpointing",
    ),
)

_TRAINER = (
    maps_to("n_gpus_per_node", "learner.n", c.ranks, reads=(".nnodes",)),
    maps_to(
        "nnodes",
        "engine.replicas",
        c.replicas,
        reads=(".n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size"),
    ),
    maps_to("device", "run.device", c.one_of(cuda="cuda", cpu="cpu"), own_default=True),
    maps_to("total_epochs", "algorithm.n_epochs"),
    maps_to("total_training_steps", "algorithm.n_steps"),
    maps_to("test_freq", "algorithm.val_every", c.positive_or_none),
    maps_to("val_before_train", "algorithm.val_before_train"),
    maps_to("save_freq", "checkpoint.every", c.positive_or_zero),
    maps_to("max_actor_ckpt_to_keep", "checkpoint.keep", own_default=True),
    maps_to("critic_warmup", "critic.warmup_steps"),
    maps_to("default_local_dir", "run.folder", c.text, own_default=True),
    maps_to("project_name", "run.parent", c.project_folder, own_default=True, reads=(".experiment_name",)),
    maps_to("experiment_name", "run.parent", c.experiment_folder, own_default=True),
    maps_to(
        "logger",
        "run.loggers",
        c.trackers,
        own_default=True,
        reads=(".project_name", ".experiment_name"),
    ),
    ignored("max_critic_ckpt_to_keep", "a training state holds policy and critic"),
    ignored("balance_batch", "rows are always sharded across ranks by token count"),
    ignored(
        "ray_wait_register_center_timeout", "learner.start_timeout_s is the deadline for ranks to connect"
    ),
    maps_to(
        "v1.trainer_mode",
        "algorithm.max_staleness",
        c.max_staleness,
        reads=(".v1.sampler.max_off_policy_threshold",),
    ),
    used_by("v1.sampler.max_off_policy_threshold", ".v1.trainer_mode"),
    maps_to("v1.sampler.max_off_policy_strategy", "algorithm.stale", c.stale, reads=(".v1.trainer_mode",)),
    only("v1.separate_async.parameter_sync_step", 1, reason="weights are published after every step"),
    only("resume_mode", "auto", "disable", reason="Trainer.fit(resume=...) resumes a run"),
    only("val_only", False, reason="`raylight eval` scores a model without training"),
    only("log_val_generations", 0, reason="all rollouts are in the store, including those of validation"),
)

SECTIONS = {
    "algorithm": _ALGORITHM,
    "data": _DATA,
    ACTOR: _ACTOR,
    MODEL: _MODEL,
    ROLLOUT: _ROLLOUT,
    REF: _REF,
    "actor_rollout_ref": (only("hybrid_engine", True, reason="learners and engines share their GPUs"),),
    "critic": _CRITIC,
    "trainer": _TRAINER,
    "agentlightning": (
        ignored("port", "the store is an actor and has no port"),
        only("trace_aggregator.level", "transition", "trajectory", reason=ROWS),
        ignored("trace_aggregator.trajectory_max_prompt_length", ROW_LIMIT),
        ignored("trace_aggregator.trajectory_max_response_length", ROW_LIMIT),
        ignored("trace_aggregator.debug", "`trace/drifts_*` count the calls that did not continue a row"),
        ignored("trace_aggregator.mismatch_log_dir", "`raylight trace` shows where a call left its row"),
    ),
}
KEYS: dict[str, KeyRule] = by_full_key(SECTIONS)
NOT_IN_VERL = (
    "agentlightning.port",
    "algorithm.off_policy_sampling",
    "algorithm.override_sampling",
    *(key for key in KEYS if ".trace_aggregator." in key or ".gdpo_" in key),
    f"{MODEL}.override_config.attn_implementation",
    f"{MODEL}.target_parameters",
)
"""Keys that are not in verl's defaults: other programs' keys, and keys that verl reads without a default."""
