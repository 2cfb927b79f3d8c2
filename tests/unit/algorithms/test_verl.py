"""VERL(config): configurations of verl and agent-lightning resolve to raylight's settings."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from run_settings import KnownFacts
from unit_helpers import ReachedRay
from verl_configs import BASE, MATH, OPEN, TAU2, changed, doc_row, settings_of

import raylight
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.verl import VERL
from raylight.algorithms.verl_config import run_settings
from raylight.algorithms.verl_config.keys import KEYS, SECTIONS
from raylight.algorithms.verl_config.resolution import nearest
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.trainer.cluster_fit import cluster_settings
from raylight.trainer.trainer import Trainer

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def pretend_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "has_vllm", lambda: True)


SHARED = {
    "algorithm.model": "models/tiny",
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std": True,
    "algorithm.loss_mode": "vanilla",
    "algorithm.loss_agg_mode": "token-mean",
    "algorithm.lr": 1e-6,
    "algorithm.lr_schedule": "constant",
    "algorithm.lr_warmup_steps": 0,
    "algorithm.weight_decay": 0.01,
    "algorithm.betas": (0.9, 0.999),
    "algorithm.grad_clip": 1.0,
    "algorithm.clip_ratio_low": 0.2,
    "algorithm.clip_ratio_high": 0.3,
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.kl_coef": 0.0,
    "algorithm.kl_reward_coef": 0.0,
    "algorithm.entropy_coef": 0.0,
    "algorithm.mini_batches": 1,
    "algorithm.ppo_epochs": 1,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.rollout_is": "auto",
    "algorithm.rollout_rs": None,
    "algorithm.bypass_mode": False,
    "algorithm.zero_variance_groups": "keep",
    "algorithm.n_steps": None,
    "algorithm.val_before_train": True,
    "algorithm.val_samples": 1,
    "algorithm.sampling_parameters": {"temperature": 1.0},
    "engine.kind": "vllm",
    "engine.replicas": 1,
    "engine.num_gpus": 0.4,
    "engine.dtype": "bfloat16",
    "engine.max_concurrent": 256,
    "engine.sleep_while_learning": True,
    "engine.args.tensor_parallel_size": 1,
    "engine.args.tool_call_parser": "hermes",
    "engine.args.enable_auto_tool_choice": True,
    "engine.args.enable_sleep_mode": True,
    "learner.n": 1,
    "learner.num_gpus": 0.6,
    "learner.dtype": "bfloat16",
    "learner.lora": None,
    "learner.packed": True,
    "learner.gradient_checkpointing": True,
    "learner.param_offload": True,
    "learner.optimizer_offload": True,
    "learner.torch_compile": False,
    "learner.ulysses": 1,
    "run.output_dir": None,
    "run.seed": None,
    "run.cpu_fallback": True,
}
"""Settings that both examples resolve to."""


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (
            MATH,
            {
                "algorithm.tasks_per_step": 32,
                "algorithm.group_size": 4,
                "algorithm.n_epochs": 2,
                "algorithm.val_every": 32,
                "checkpoint.every": 64,
                "engine.max_model_len": 6144,
                "engine.args.gpu_memory_utilization": 0.6,
                "learner.max_tokens_per_micro_batch": 4 * 6144,
                "run.outputs": "outputs/AgentLightning/calc_x",
            },
        ),
        (
            TAU2,
            {
                "algorithm.tasks_per_step": 8,
                "algorithm.group_size": 8,
                "algorithm.n_epochs": 8,
                "algorithm.val_every": 4,
                "checkpoint.every": 0,
                "engine.max_model_len": 10240,
                "engine.args.gpu_memory_utilization": 0.8,
                "learner.max_tokens_per_micro_batch": 4 * 10240,
                "run.outputs": "outputs/agent-framework-lab-lightning/tau2_agent",
            },
        ),
    ],
    ids=["math", "tau2"],
)
def test_the_examples_resolve_unchanged(config: dict[str, Any], own: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = settings_of(config)
    expected = SHARED | own
    assert {name: settings[name] for name in expected} == expected
    assert "critic.lr" not in settings


def test_agent_lightnings_aggregation_is_what_raylight_does() -> None:
    aggregator = {"level": "trajectory", "trajectory_max_prompt_length": 8, "debug": True}
    given = MATH | {"agentlightning": {"port": 9999, "trace_aggregator": aggregator}}
    assert settings_of(given) == settings_of(MATH)
    with pytest.raises(ConfigError, match=r"trace_aggregator\.level='turn'"):
        VERL(MATH | {"agentlightning": {"trace_aggregator": {"level": "turn"}}})


def with_loggers(*names: str, strict: bool = True, trainer: Any = None, **keys: str) -> Any:
    keys = {f"trainer.{name}": value for name, value in keys.items()}
    config = BASE | {"trainer.logger": list(names)} | keys
    return VERL(config, strict=strict).adjust_run_settings(replace(OPEN, loggers=trainer))


def test_verls_trackers_are_loggers_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_loggers("console", "file").loggers is None
    wandb = with_loggers("console", "tracking", project_name="p", experiment_name="e")
    assert wandb.loggers == ["console", "jsonl", "plot", {"type": "wandb", "project": "p", "name": "e"}]
    unsupported = with_loggers("rl_insight")
    assert unsupported.loggers is None
    assert "trainer.logger: rl_insight is not supported and receives no metrics" in unsupported.notes[-2]
    with pytest.raises(ConfigError, match="the Trainer has loggers"):
        with_loggers("wandb", trainer=["jsonl"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"swanlab is not installed; pip install 'raylight\[swanlab\]'"):
        with_loggers("swanlab")
    missing = with_loggers("swanlab", strict=False)
    assert missing.loggers is None
    assert any("swanlab is not installed" in note for note in missing.notes)


def test_verls_defaults_fill_unset_keys() -> None:
    algorithm = VERL(
        {
            "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"name": "vllm"}},
            "trainer": {"n_gpus_per_node": 2},
        }
    )
    assert (
        algorithm.tasks_per_step,
        algorithm.mini_batches,
        algorithm.n_epochs,
        algorithm.advantage.name,
    ) == (1024, 4, 30, "gae")
    assert (algorithm.critic.lr, algorithm.critic.mini_batches, algorithm.lr) == (1e-5, 4, 1e-6)
    combined = algorithm.adjust_run_settings(OPEN)
    assert (combined.learner.n, combined.engine.replicas, combined.engine.args["tensor_parallel_size"]) == (
        2,
        1,
        2,
    )
    assert (combined.engine.max_model_len, combined.learner.max_tokens_per_micro_batch) == (1024, 16384)


def test_dotted_keys_and_an_omegaconf_equal_nested_dicts() -> None:
    dotted = {
        "algorithm.adv_estimator": "grpo",
        "data": {"train_batch_size": 8},
        "actor_rollout_ref.model": {"path": "models/tiny"},
        "actor_rollout_ref": {
            ROLLOUT.rpartition(".")[2]: {"name": "vllm"},
            "rollout.n": 4,
            "rollout.tensor_model_parallel_size": 1,
        },
        "trainer.n_gpus_per_node": 1,
    }
    assert settings_of(dotted) == settings_of(BASE)
    assert settings_of(OmegaConf.create(MATH)) == settings_of(MATH)
    other = OmegaConf.create(MATH | {"trainer": MATH["trainer"] | {"save_freq": "${trainer.test_freq}"}})
    assert settings_of(other) == settings_of(changed(MATH, {"trainer.save_freq": 32}))


def test_numbers_of_numpy_equal_those_of_python() -> None:
    other = {"data.train_batch_size": np.int64(8), f"{ROLLOUT}.temperature": np.float32(0.5)}
    same = {"data.train_batch_size": 8, f"{ROLLOUT}.temperature": 0.5}
    assert settings_of(changed(BASE, other)) == settings_of(changed(BASE, same))


def test_a_complete_configuration_of_verl_is_accepted() -> None:
    """Hydra composes every key of verl; those that raylight does not support have their defaults."""
    from raylight.algorithms.verl_config.merged_config import verl_defaults

    # it even sets Megatron's adapter and a tool parser that does not depend on the model
    whole = OmegaConf.merge(verl_defaults(), changed(MATH, {}))
    settings, plain = settings_of(whole), settings_of(MATH)
    same = {name for name in plain if settings.get(name) == plain[name]}
    assert {name for name in plain if name.startswith(("algorithm.", "checkpoint."))} - same == {
        "algorithm.calculate_entropy"
    }


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("data.batch_size", "data.train_batch_size"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(key: str, near: str) -> None:
    assert near in nearest(key)
    with pytest.raises(
        ConfigError, match=rf"does not support {key}; the nearest keys that it supports: .*\b{near}\b"
    ):
        VERL(BASE | {key: 1})


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        VERL(BASE | {"trainer.no_such": 1, "data.shuffle": False, f"{ROLLOUT}.name": "sglang"})
    for part in (
        "does not support trainer.no_such",
        "data.shuffle=False is not supported",
        "'sglang' must be one of vllm, hf",
    ):
        assert part in str(error.value)


def test_without_strict_each_problem_is_a_warning_and_ignored() -> None:
    config = BASE | {"trainer.no_such": 1, "data.shuffle": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm = VERL(config, strict=False)
    assert [str(item.message).split(";")[0] for item in caught] == [
        "ignored: raylight does not support trainer.no_such",
        "ignored: data.shuffle=False is not supported: every epoch is shuffled",
    ]
    assert caught[0].filename == __file__
    assert algorithm.model_dump() == VERL(BASE).model_dump()


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        (
            {"actor_rollout_ref.actor.ppo_mini_batch_size": 3},
            "ppo_mini_batch_size=3 must divide data.train_batch_size=8",
        ),
        (
            {"actor_rollout_ref.actor.ppo_mini_batch_size": 16},
            "ppo_mini_batch_size=16 must divide data.train_batch_size=8",
        ),
        ({f"{ROLLOUT}.n": 1}, "must be 2 or more: grpo compares the rollouts of a task with one another"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "1 GPUs .* cannot be divided into engines"),
        (
            {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1},
            "set lr_warmup_steps or trainer.total_training_steps",
        ),
        (
            {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1000},
            "must hold the longest row, which has 1024 tokens",
        ),
        (
            {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": "full"},
            "must be one of kl, k1",
        ),
        ({"algorithm.filter_groups.enable": True}, "means no limit of rounds per step; set a limit"),
        (
            {"actor_rollout_ref.actor.grad_clip": 0.5, "actor_rollout_ref.actor.optim.clip_grad": 1.0},
            "grad_clip=0.5 and .*clip_grad=1.0 both set algorithm.grad_clip; remove one",
        ),
        (
            {"actor_rollout_ref.actor.optim.lr": "fast"},
            r"actor_rollout_ref.actor.optim.lr \(lr\): Input should be",
        ),
        ({"data.train_batch_size": "many"}, "data.train_batch_size"),
        ({"data": {"train_batch_size": 4}}, "data.train_batch_size has two values, 8 and 4; remove one"),
        (
            {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.gpu_memory_utilization": 0.5},
            "is an argument of vLLM, and .*name is 'hf'",
        ),
        ({"data.seed": -1}, "data.seed=-1 must be a whole number from 0 to 4294967295"),
        ({f"{ROLLOUT}.seed": 2**40}, "must be a whole number from 0 to 4294967295"),
        ({"data.seed": "lucky"}, "data.seed='lucky' must be a whole number"),
        ({"critic.enable": True}, "critic need each other"),
        ({"data.truncation": "left"}, "prompts are never truncated"),
        ({f"{ROLLOUT}.temperature": "hot"}, "temperature='hot' must be a number above 0"),
        ({f"{ROLLOUT}.temperature": 0.0}, "temperature=0.0 must be a number above 0"),
        ({f"{ROLLOUT}.engine_kwargs.vllm": "fast"}, "engine_kwargs.vllm='fast' must be a mapping"),
        (
            {"trainer.total_epochs": "${no.such}"},
            "trainer.total_epochs: Interpolation key 'no.such' not found",
        ),
        (
            {"actor_rollout_ref.actor.optim.betas.first": 0.9},
            "does not support actor_rollout_ref.actor.optim.betas.first",
        ),
        ({"actor_rollout_ref.actor.optim.betas": [2.0, 0.9]}, "less than 1"),
        (
            {"actor_rollout_ref.actor.optim.lr": float("inf")},
            "optim.lr is inf; give a finite number",
        ),
    ],
)
def test_an_invalid_value_is_an_error_that_names_the_key(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VERL(BASE | dotted)


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", f"{ROLLOUT}.name"])
def test_required_keys_of_verl_are_required(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        VERL({name: value for name, value in BASE.items() if name != key})


@pytest.mark.parametrize("config", [None, "grpo", ["algorithm"], {1: 2}, {"algorithm": {"gamma": object()}}])
def test_an_invalid_configuration_is_an_error(config: Any) -> None:
    with pytest.raises(ConfigError):
        VERL(config if not isinstance(config, dict) else BASE | config)


def test_the_transformers_engine_by_its_name() -> None:
    settings = settings_of(BASE | {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.multi_turn.format": "llama3_json"})
    assert settings["engine.kind"] == "transformers"
    assert {name: value for name, value in settings.items() if name.startswith("engine.args.")} == {
        "engine.args.tool_parser": "llama_json"
    }
    assert not settings["engine.sleep_while_learning"]


@pytest.mark.parametrize(
    "key", ["ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"]
)
def test_ranks_that_share_sequences_have_raylights_attention(key: str) -> None:
    chosen = {"actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2"}
    gpus = {"trainer.n_gpus_per_node": 8}
    assert settings_of(BASE | gpus | chosen)["learner.attention"] == "flash_attention_2"
    shared = settings_of(BASE | gpus | chosen | {f"actor_rollout_ref.actor.{key}": 2})
    assert (shared["learner.attention"], shared["learner.ulysses"]) == ("auto", 2)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_engines_stay_awake_while_rollouts_overlap_updates(mode: str) -> None:
    settings = settings_of(BASE | {"trainer.v1.trainer_mode": mode})
    assert settings["algorithm.max_staleness"] > 0
    assert not settings["engine.sleep_while_learning"]
    assert "engine.args.enable_sleep_mode" not in settings


@pytest.mark.parametrize(
    "config", [BASE, MATH, OmegaConf.create(MATH)], ids=["dotted", "nested", "omegaconf"]
)
def test_its_arguments_construct_an_equal_algorithm(config: Any) -> None:
    algorithm = VERL(config).with_epochs(2)
    again = VERL(**algorithm.arguments())
    assert again.model_dump() == algorithm.model_dump()
    assert again.n_epochs == 2


def test_its_arguments_are_yaml_values() -> None:
    inner = OmegaConf.create(MATH["actor_rollout_ref"])
    config = {**MATH, "actor_rollout_ref": inner, "actor_rollout_ref.model.path": Path("models/tiny")}
    inner.model.pop("path")
    arguments = yaml.safe_load(yaml.safe_dump(VERL(config).arguments()))
    assert VERL(**arguments).model_dump() == VERL(MATH).model_dump()


def test_numbers_of_numpy_are_written_as_pythons() -> None:
    config = BASE | {
        "actor_rollout_ref": {"actor": {"optim": {"lr": np.float64(1e-5)}}},
        "data.seed": np.int64(3),
    }
    written = yaml.safe_load(yaml.safe_dump(VERL(config).arguments()))
    assert VERL(**written).model_dump() == VERL(config).model_dump()
    assert VERL(**written).lr == 1e-5


@pytest.mark.parametrize(
    ("length", "n_train", "steps", "repeated"),
    [
        ({"total_training_steps": 500, "total_epochs": 2}, 32, 8, 0),
        ({"total_training_steps": 500, "total_epochs": 2}, 30, 8, 4),
        ({"total_training_steps": 500}, 32, 120, 0),  # 30 epochs by default
        ({"total_training_steps": 5, "total_epochs": 2}, 30, 5, 0),
        ({"total_training_steps": 5}, 0, 5, 0),  # their number is not known
        ({"total_epochs": 2}, 30, 8, 4),
    ],
)
def test_a_run_ends_by_steps_or_epochs_whichever_is_earlier(
    length: dict[str, int], n_train: int, steps: int, repeated: int
) -> None:
    batch = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
    algorithm = VERL(BASE | batch | {f"trainer.{name}": value for name, value in length.items()})
    assert (algorithm.steps(n_train), algorithm.repeated_tasks(n_train)) == (steps, repeated)


def test_remax_has_its_greedy_rollouts() -> None:
    assert VERL(BASE | {"algorithm.adv_estimator": "remax"}).needs_greedy_rollouts
    assert not VERL(BASE).needs_greedy_rollouts


# combined with the Trainer's arguments


def test_it_is_a_policy_algorithm() -> None:
    assert raylight.VERL is VERL
    trainer = Trainer(algorithm=VERL(TAU2), n_runners=3)
    assert isinstance(trainer.algorithm, PolicyAlgorithm)
    assert (trainer.runner.n, trainer.learner.n, trainer.engine.kind, trainer.checkpoint.every) == (
        3,
        1,
        "vllm",
        0,
    )
    described = Trainer(algorithm={"type": "raylight.VERL", "config": TAU2})
    assert described.algorithm == trainer.algorithm


def test_the_trainers_arguments_are_combined() -> None:
    trainer = Trainer(
        algorithm=VERL(MATH),
        learner={"num_cpus": 2, "n": 1},
        engine={"port": 9123, "args": {"swap_space": 1}},
        seed=5,
        output_dir="here",
    )
    assert (trainer.learner.num_cpus, trainer.learner.param_offload, trainer.engine.port) == (2, True, 9123)
    assert trainer.engine.args["swap_space"] == 1
    assert trainer.engine.args["gpu_memory_utilization"] == 0.6
    assert (trainer.seed, trainer.output_dir) == (5, "here")


def test_the_trainer_overrides_verls_defaults() -> None:
    trainer = Trainer(
        algorithm=VERL(MATH), learner={"dtype": "float32", "num_gpus": 0}, engine={"dtype": "float32"}
    )
    assert (trainer.learner.dtype, trainer.engine.dtype, trainer.learner.num_gpus) == (
        "float32",
        "float32",
        0,
    )
    assert Trainer(algorithm=VERL(BASE), num_epochs=3).algorithm.n_epochs == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"n_learners": 2},
            r"the Trainer has learner.n=2, and the configuration has trainer.n_gpus_per_node=1; remove one",
        ),
        (
            {"engine": {"kind": "transformers"}},
            "engine.kind='transformers', and .* actor_rollout_ref.rollout.name='vllm'",
        ),
        (
            {"engine": {"args": {"gpu_memory_utilization": 0.1}}},
            "engine.args.gpu_memory_utilization=0.1, and .*=0.6",
        ),
        (
            {"learner": {"param_offload": False}},
            "learner.param_offload=False, and .*fsdp_config.param_offload",
        ),
        ({"num_epochs": 5}, "num_epochs=5, and the configuration has trainer.total_epochs=2"),
    ],
)
def test_a_contradiction_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(algorithm=VERL(MATH), **arguments)


def test_contradicting_seed_and_folder_are_an_error() -> None:
    config = BASE | {"data.seed": 3, "trainer.default_local_dir": "there"}
    assert Trainer(algorithm=VERL(config)).seed == 3
    assert Trainer(algorithm=VERL(config)).output_dir == "there"
    with pytest.raises(ConfigError, match=r"seed=4, and the configuration has data\.seed=3"):
        Trainer(algorithm=VERL(config), seed=4)
    with pytest.raises(ConfigError, match=r"output_dir=.*here.*, and .* trainer.default_local_dir"):
        Trainer(algorithm=VERL(config), output_dir=Path("here"))


# without GPUs, and without vLLM


def test_on_a_cluster_without_gpus_as_many_ranks_compute_on_cpus() -> None:
    config = BASE | {
        "trainer.n_gpus_per_node": 4,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.gpu_memory_utilization": 0.6,
        f"{ROLLOUT}.multi_turn.format": "hermes",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
    }
    on_gpus = VERL(config).adjust_run_settings(OPEN)
    assert (
        on_gpus.learner.n,
        on_gpus.learner.num_gpus,
        on_gpus.learner.ulysses,
        on_gpus.engine.replicas,
    ) == (4, 0.6, 2, 2)
    on_cpus = on_gpus.cpu_fallback
    assert (on_cpus.learner.n, on_cpus.learner.num_gpus, on_cpus.learner.ulysses) == (4, 0, 1)
    assert (on_cpus.engine.num_gpus, on_cpus.engine.replicas, on_cpus.engine.sleep_while_learning) == (
        0,
        1,
        False,
    )
    assert on_cpus.engine.args == {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    assert "= 4 learner ranks run on CPUs" in on_cpus.notes[-1]
    assert VERL(config | {"trainer.device": "cpu"}).adjust_run_settings(OPEN) == on_cpus
    assert VERL(config | {"trainer.device": "cuda"}).adjust_run_settings(OPEN).cpu_fallback is None


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_run_settles_on_what_the_cluster_has(
    gpus: int, planned_runs: list[Any], hollow_model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = BASE | {
        "actor_rollout_ref.model.path": hollow_model,
        f"{ROLLOUT}.name": "hf",
        "trainer.project_name": "p",
    }
    trainer = Trainer(algorithm=VERL(config), num_epochs=3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReachedRay):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])
    (run,) = planned_runs
    assert run.total_steps == 2
    assert run.folder.parent == tmp_path / "outputs" / "p"
    assert run.settings.training.algorithm.sampling_parameters == {"temperature": 1.0}
    monkeypatch.setattr(cluster_settings, "check_memory", lambda settings: None)
    notes = run.for_cluster(KnownFacts(gpus))
    engine, training = run.settings.serving.engine, run.settings.training
    assert (training.learner.num_gpus, engine.num_gpus) == ((0.6, 0.4) if gpus else (0, 0))
    assert (engine.kind, engine.weight_transfer) == ("transformers", "gloo")
    assert training.algorithm.max_logprob_mismatch == 0.3
    assert any("no GPU: " in note for note in notes) == (not gpus)
    assert run.config(trainer._given)["algorithm"]["name"] == "VERL"


def test_the_trainers_gpus_hold_with_and_without_gpus() -> None:
    given = OPEN.__class__(OPEN.engine, LearnerConfig(num_gpus=1), OPEN.checkpoint)
    combined = VERL(BASE).adjust_run_settings(given)
    assert (combined.learner.num_gpus, combined.cpu_fallback.learner.num_gpus) == (1, 1)


def test_vllm_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "has_vllm", lambda: False)
    with pytest.raises(ConfigError, match=r"name is vllm, which is not installed: .*; or set it to hf"):
        Trainer(algorithm=VERL(MATH))
    trainer = Trainer(algorithm=VERL(MATH, strict=False))
    assert (trainer.engine.kind, trainer.engine.args, trainer.engine.sleep_while_learning) == (
        "auto",
        {},
        False,
    )
    assert any(
        "vLLM is not installed: the transformers engine serves" in note for note in trainer.run_settings.notes
    )


def test_the_documented_table_is_that_of_the_rules() -> None:
    text = (Path(__file__).parents[3] / "docs" / "verl.md").read_text()
    for section, names in SECTIONS.items():
        table = text.partition(f"### `{section}`\n")[2].partition("\n###")[0].splitlines()
        rows = [doc_row(KEYS[f"{section}.{name}"], section) for name in names]
        assert [line for line in table if line.startswith("| `")] == rows
    assert len([line for line in text.splitlines() if line.startswith("| `")]) == len(KEYS)


def test_a_reference_that_an_omegaconf_cannot_resolve_is_an_error() -> None:
    from omegaconf import OmegaConf

    with pytest.raises(ConfigError, match=r"cannot be resolved: Interpolation key 'no.such' not found"):
        VERL(OmegaConf.create({"trainer": {"total_epochs": "${no.such}"}}))
