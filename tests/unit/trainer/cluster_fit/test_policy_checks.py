"""Checks and defaults of a run that trains: the transport of weights, limits, and the trained agents."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_settings import KnownFacts, policy_settings
from unit_helpers import ReachedRay

from raylight.agent.decorators import rollout
from raylight.algorithms.policy import GRPO
from raylight.config import EngineConfig, LearnerConfig, LoraConfig
from raylight.errors import AgentSignatureError, ConfigError
from raylight.learner.model.adapter import adapted_layers
from raylight.quickstart import STARTER_MODEL
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.cluster_fit.cluster_settings import finish_trained, fit_hardware
from raylight.trainer.cluster_fit.hardware import Hardware, Workload, choose
from raylight.trainer.cluster_fit.policy_checks import (
    check_models,
    engine_with_transport,
    idle_hardware,
    trainable_engine,
    trained_agents_pattern,
    with_mismatch_limit,
)
from raylight.trainer.spec.settings import ServingSettings
from raylight.trainer.trainer import Trainer
from raylight.weights.peft_files import ADAPTER_FILES

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
"""Adapted layers of the starter model."""


def planned(fit: Any, gpus: float) -> str:
    """Return the transport of a run that found GPUs."""
    settings = fit.settings
    engine = settings.serving.engine.model_copy(update={"kind": "vllm"})
    choice = choose(Hardware(gpus), engine, settings.training.learner, Workload(4096))
    settings = replace(
        settings,
        serving=replace(settings.serving, engine=choice.engine),
        training=replace(settings.training, learner=choice.learner),
    )
    return str(finish_trained(settings).serving.engine.weight_transfer)


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        (0, "auto", "gloo"),
        (1, "auto", "ipc"),
        (2, "auto", "nccl"),
        (2, "sharded_rdt", "sharded_rdt"),
    ],
)
def test_the_transport_follows_the_gpus_that_a_run_takes(
    gpus: float,
    asked: str,
    expected: str,
    planned_runs: list[Any],
    hollow_model: str,
    tmp_path: Path,
) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model), output_dir=str(tmp_path), engine={"weight_transfer": asked}
    )
    with pytest.raises(ReachedRay):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])
    assert planned(planned_runs[0], gpus) == expected


def test_an_unknown_transport_is_refused_before_ray(hollow_model: str) -> None:
    trainer = Trainer(algorithm=GRPO(model=hollow_model), engine={"weight_transfer": "ncl"})
    with pytest.raises(ConfigError, match="no transport 'ncl'"):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])


def test_speculative_decoding_is_refused_to_a_trained_engine() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    engine = EngineConfig(kind="vllm", args={"speculative_config": drafts})
    with pytest.raises(ConfigError, match=r"speculative_config.*leave it out to train"):
        trainable_engine(engine, LearnerConfig())


def test_a_transport_that_the_cluster_cannot_use_is_refused(
    planned_runs: list[Any], hollow_model: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        algorithm=GRPO(model=hollow_model), output_dir=str(tmp_path), engine={"weight_transfer": "nccl"}
    )
    with pytest.raises(ReachedRay):
        trainer.fit(lambda task, llm: 1.0, [1, 2, 3])
    with pytest.raises(ConfigError, match="needs GPUs on both sides"):
        planned(planned_runs[0], 0)


@pytest.mark.parametrize("correction", [None, "token"])
def test_a_warning_above_the_default_limit_is_refused_unless_the_run_corrects(
    correction: str | None, planned_runs: list[Any], hollow_model: str, tmp_path: Path
) -> None:
    algorithm = GRPO(model=hollow_model, warn_logprob_mismatch=0.9, rollout_is=correction)
    with pytest.raises(ReachedRay):
        Trainer(algorithm=algorithm, output_dir=str(tmp_path)).fit(lambda task, llm: 1.0, [1, 2, 3])
    if correction is None:
        with pytest.raises(ConfigError, match="above the limit at which the run fails, 0"):
            planned(planned_runs[0], 0)
    else:
        planned(planned_runs[0], 0)


def test_engines_that_sleep_during_updates_cannot_sample_beside_them() -> None:
    engine = EngineConfig(kind="vllm", sleep_while_learning=True)
    with pytest.raises(ConfigError, match=r"max_staleness above 0 .*sleep_while_learning"):
        engine_with_transport(engine, LearnerConfig(), overlaps=True)
    awake = engine.model_copy(update={"sleep_while_learning": False})
    assert engine_with_transport(awake, LearnerConfig(), overlaps=True).weight_transfer == "gloo"


def trained(of_agent: str | None, adapter: Any) -> str | None:
    agent = rollout(trained_agents=of_agent)(lambda task: 1.0)
    return trained_agents_pattern(agent, adapter, GRPO(model="m"))


def test_the_pattern_comes_from_the_agent_or_the_adapter() -> None:
    assert trained(None, None) is None
    assert trained("plan", None) == "plan"
    assert trained(None, TracerTraceToTriplet(agent_match="code")) == "code"
    assert trained("code", TracerTraceToTriplet(agent_match="code")) == "code"


def test_two_patterns_that_differ_are_an_error() -> None:
    with pytest.raises(ConfigError, match="trained_agents='plan' and the adapter agent_match='code'"):
        trained("plan", TracerTraceToTriplet(agent_match="code"))


def test_an_adapter_without_a_pattern_would_not_be_read() -> None:
    with pytest.raises(ConfigError, match="GRPO trains on the tokens that the engine recorded"):
        trained("plan", TracerTraceToTriplet())


def test_a_pattern_is_one() -> None:
    with pytest.raises((ConfigError, AgentSignatureError), match="regular expression"):
        trained("(", None)
    with pytest.raises(ConfigError, match="regular expression"):
        trained(None, TracerTraceToTriplet(agent_match="("))


@pytest.mark.parametrize(
    ("engine", "learner", "experts", "given", "expected"),
    [
        ("float32", "float32", None, 0.0, 1e-3),
        ("bfloat16", "float32", None, 0.0, 0.3),
        ("float32", "bfloat16", 1, 0.0, 0.3),
        ("bfloat16", "bfloat16", 128, 0.0, 2.0),
        ("float32", "float32", 128, 0.0, 1e-3),
        ("bfloat16", "bfloat16", 128, 0.01, 0.01),
    ],
)
def test_rounding_of_half_precision_and_of_routers_is_no_mismatch(
    engine: Any, learner: Any, experts: int | None, given: float, expected: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_experts": experts}}))
    algorithm = GRPO(model="m", max_logprob_mismatch=given, warn_logprob_mismatch=1e-4)
    engine_config, learner_config = EngineConfig(dtype=engine), LearnerConfig(dtype=learner)
    found = with_mismatch_limit(algorithm, engine_config, learner_config, str(tmp_path))
    assert found.max_logprob_mismatch == expected


@pytest.mark.parametrize(
    ("engine", "learner", "resources", "expected"),
    [
        ({}, {}, {"CPU": 16.0}, []),
        ({"num_gpus": 1}, {}, {"CPU": 2.0, "GPU": 8.0}, ["has 8 GPUs, and the learners compute on CPUs"]),
        ({"num_gpus": 1}, {"num_gpus": 1}, {"CPU": 2.0, "GPU": 2.0}, []),
        ({"num_gpus": 1}, {"num_gpus": 1, "n": 4}, {"CPU": 2.0, "GPU": 8.0}, ["3 of 8 GPUs"]),
        (
            {"num_gpus": 1, "replicas": 2, "args": {"tensor_parallel_size": 2}},
            {"num_gpus": 1, "n": 4},
            {"CPU": 2.0, "GPU": 8.0},
            [],
        ),
        ({"num_gpus": 0.4}, {"num_gpus": 0.6}, {"GPU": 1.0}, []),
        ({"num_gpus": 0.4}, {"num_gpus": 0.6, "n": 3}, {"GPU": 3.0}, []),
    ],
)
def test_idle_hardware_is_noted(engine: Any, learner: Any, resources: Any, expected: list[str]) -> None:
    notes = idle_hardware(EngineConfig(**engine), LearnerConfig(**learner), resources)
    assert len(notes) == len(expected)
    assert all(text in note for text, note in zip(expected, notes, strict=True))


@pytest.mark.parametrize(("teacher_gpus", "expected"), [(1, []), (0, ["teacher computes on CPUs", "1 of 3"])])
def test_a_teacher_on_cpus_beside_gpus_is_noted(teacher_gpus: float, expected: list[str]) -> None:
    on_gpu = {"num_gpus": 1}
    teacher = ServingSettings("t", EngineConfig(num_gpus=teacher_gpus), "teacher")
    notes = idle_hardware(EngineConfig(**on_gpu), LearnerConfig(**on_gpu), {"GPU": 3.0}, [teacher])
    assert all(text in note for text, note in zip(expected, notes, strict=True))


def test_the_adapted_layers_of_a_model():
    assert adapted_layers(str(STARTER_MODEL), LoraConfig()) == LINEAR
    chosen = LoraConfig(target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"])
    assert adapted_layers(str(STARTER_MODEL), chosen) == ["q_proj"]
    for settings, message in [
        ({"target_modules": ["nowhere"]}, "do not fit"),
        ({"target_modules": ["embed_tokens"]}, "matches model.embed_tokens, which cannot be adapted"),
        ({"target_modules": ["lm_head"]}, "matches lm_head, which cannot be adapted"),
    ]:
        with pytest.raises(ConfigError, match=message):
            adapted_layers(str(STARTER_MODEL), LoraConfig(**settings))


def with_adapter(engine: dict[str, Any], lora: dict[str, Any] | None, staleness: int = 0) -> EngineConfig:
    """Return the engine of a run whose learners have an adapter."""
    learner = LearnerConfig(lora=None if lora is None else LoraConfig(**lora))
    algorithm = GRPO(model="m", max_staleness=staleness)
    settings = policy_settings(str(STARTER_MODEL), EngineConfig(**engine), learner, algorithm)
    return finish_trained(settings).serving.engine


def test_an_engine_gets_room_for_the_adapter_and_vllm_its_layers():
    for engine, lora in [({"kind": "vllm"}, None), ({"kind": "vllm"}, {"serve": "merged"})]:
        assert with_adapter(engine, lora) == EngineConfig(**engine, weight_transfer="gloo")
    changed = with_adapter({"kind": "transformers"}, {})
    assert (changed.max_adapters, changed.args) == (1, {})
    changed = with_adapter({"kind": "vllm", "max_adapters": 3}, {"rank": 4})
    assert changed.max_adapters == 3
    assert changed.args == {"max_lora_rank": 4, "lora_target_modules": LINEAR}
    assert with_adapter({"kind": "vllm"}, {}, staleness=2).max_adapters == 2, "one is pinned"
    own = {"max_lora_rank": 32, "enforce_eager": True}
    changed = with_adapter({"kind": "vllm", "args": own}, {})
    assert changed.args == own | {"lora_target_modules": LINEAR}
    with pytest.raises(ConfigError, match=r"up to rank 512, not 600: lower learner\.lora\.rank"):
        with_adapter({"kind": "vllm"}, {"rank": 600})


def test_several_models_are_adapters_that_engines_serve(tmp_path: Path):
    several = GRPO(model="m", models={"planner": {}, "coder": str(tmp_path)})
    for learner in (
        LearnerConfig(),
        LearnerConfig(lora=LoraConfig(serve="merged")),
        LearnerConfig(kind="local", lora=LoraConfig()),
    ):
        with pytest.raises(ConfigError, match="several models, and opponents, are LoRA adapters"):
            check_models(several, learner)
        check_models(GRPO(model="m"), learner)
    learner = LearnerConfig(lora=LoraConfig())
    with pytest.raises(ConfigError, match="'coder' has no LoRA adapter in peft's format"):
        check_models(several, learner)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"'coder' is a full model.*one base.*endpoint"):
        check_models(several, learner)
    for file in ADAPTER_FILES:
        (tmp_path / file).write_text("{}")
    check_models(several, learner)
    settings = policy_settings(str(STARTER_MODEL), EngineConfig(kind="vllm"), learner, several)
    assert finish_trained(settings).serving.engine.max_adapters == 2


def with_replay(model: str, **engine: Any) -> EngineConfig:
    """Return the engine of a run with router replay, as its memory is planned."""
    config, learner = EngineConfig(**engine), LearnerConfig(router_replay=True)
    settings = policy_settings(model, config, learner, GRPO(model="m"))
    return fit_hardware(settings, config, KnownFacts())[0].serving.engine


def test_router_replay_needs_a_mixture_and_an_engine_that_records_routes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4}))
    mixture = str(tmp_path)
    assert with_replay(mixture, kind="transformers").args == {"record_routes": True}
    alone = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    recording = alone | {"enable_return_routed_experts": True}
    assert with_replay(mixture, kind="vllm", args=alone).args == recording
    without = {"enable_return_routed_experts": False}
    offloaded = {"kv_offloading_size": 4.0}
    transferred = {"kv_transfer_config": {"kv_connector": "C"}}
    for args in ({"pipeline_parallel_size": 2}, transferred, offloaded, {"quantization": "fp8"}):
        with pytest.raises(ConfigError, match=f"leave {next(iter(args))} out of engine.args"):
            with_replay(mixture, kind="vllm", args=args)
    with pytest.raises(ConfigError, match="leave enable_return_routed_experts out"):
        with_replay(mixture, kind="vllm", args=without)
    with pytest.raises(ConfigError, match=r"'package.module:Engine' does not record .* set engine.kind to"):
        with_replay(mixture, kind="package.module:Engine")
    with pytest.raises(ConfigError, match="is not a mixture of experts; leave the setting out"):
        with_replay(str(STARTER_MODEL), kind="transformers")
