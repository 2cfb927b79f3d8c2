"""The check of a run's memory before it starts."""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from run_settings import policy_settings

import raylight as rl
from raylight.algorithms.policy import GRPO, RunSettings
from raylight.algorithms.teacher import TeacherConfig
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig
from raylight.doctor import report
from raylight.errors import ConfigError
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit import memory_check
from raylight.trainer.cluster_fit.cluster_settings import plan_settings
from raylight.trainer.cluster_fit.cluster_shape import GIB, ClusterShape, NodeShape
from raylight.trainer.spec.settings import (
    RewardModelSettings,
    ServedTeacher,
    ServingSettings,
    TrainedSettings,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model with 500 million parameters, whose weights are a hole in a file."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=150_000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    with open(folder / "model.safetensors", "wb") as file:
        os.truncate(file.fileno(), 2 * GIB)
    return str(folder)


def trained(model_path: str, **learner: Any) -> TrainedSettings:
    return policy_settings(model_path, EngineConfig(kind="transformers"), LearnerConfig(**learner))


def run_settings(**engine: Any) -> RunSettings:
    return RunSettings(EngineConfig(**engine), LearnerConfig(), CheckpointConfig())


def connect(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    cluster = ClusterShape((NodeShape(int(gib * GIB)),))
    monkeypatch.setattr(memory_check, "connected_cluster", lambda: cluster)
    monkeypatch.setattr(memory_check, "this_machine", lambda: cluster.nodes[0])


def test_a_model_that_cannot_fit_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, 10)
    with pytest.raises(
        ConfigError, match=r"of host memory \(.*\); it has 10.0 GiB. It fits with learner.lora.rank=16; "
    ):
        memory_check.check_memory(trained(model))


def planned_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the runs that are planned from now on, on a cluster where each fits."""
    connect(monkeypatch, 10)
    runs = []

    def make_plan(run: Any, *_: Any, **__: Any) -> Any:
        runs.append(run)
        return SimpleNamespace(shortages=())

    monkeypatch.setattr("raylight.trainer.cluster_fit.memory_plan.make_plan", make_plan)
    return runs


def test_a_teacher_is_planned_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planned_runs(monkeypatch)
    engine = EngineConfig(kind="transformers", replicas=2)
    teacher = ServedTeacher(TeacherConfig(model=model), ServingSettings(model, engine, "teacher"))
    training = {"teachers": {"t": teacher}}
    memory_check.check_memory(policy_settings(str(STARTER_MODEL), training=training))
    assert planned == []  # its kind is not known
    policy = EngineConfig(kind="transformers")
    memory_check.check_memory(
        policy_settings(str(STARTER_MODEL), policy, training={"teachers": {"t": teacher}})
    )
    assert [run.teachers for run in planned] == [(teacher.serving,)]


def test_a_reward_model_is_planned_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planned_runs(monkeypatch)
    engine = EngineConfig(args={"max_batch_tokens": 64})
    scored = RewardModelSettings(
        rl.rewards.reward_model(model), ServingSettings(model, engine, "reward-model")
    )
    policy = policy_settings(str(STARTER_MODEL), EngineConfig(kind="transformers"), reward_models=(scored,))
    memory_check.check_memory(policy)
    assert [run.reward_models for run in planned] == [(scored.serving,)]


def test_a_model_that_fits_starts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, 40)
    memory_check.check_memory(trained(model))


def test_gpus_that_the_autoscaler_has_yet_to_start_are_no_shortage(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, 10)
    memory_check.check_memory(trained(model, n=4, num_gpus=1))


def test_gpus_elsewhere_are_planned_with_vllm(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "raylight.trainer.cluster_fit.cluster_settings.this_machine", lambda: NodeShape(8 * GIB)
    )
    cluster = ClusterShape((NodeShape(64 * GIB, 2, 24 * GIB),))
    settings = (run_settings(), RunnerConfig(), cluster)
    engine = plan_settings(GRPO(model=model), *settings).roles[1]
    assert (engine.gpus, engine.total("host") > 1400 * 2**20) == (1, True)
    given = run_settings(num_gpus=1, args={"gpu_memory_utilization": 0.5})
    assert plan_settings(GRPO(model=model), given, *settings[1:]).roles[1].gpus == 1  # arguments of vLLM


@pytest.mark.parametrize(
    ("gpus", "engine", "learner"),
    [
        (2, {"num_gpus": 0}, {}),
        (2, {"num_gpus": 0, "args": {"max_new_tokens": 8}}, {}),  # an argument that vLLM lacks
        (1, {}, {"num_gpus": 1}),
    ],
)
@pytest.mark.parametrize("here", [0, 2])
def test_an_engine_on_cpus_is_planned_as_the_run_chooses_it(
    model: str, monkeypatch: pytest.MonkeyPatch, gpus: int, engine: Any, learner: Any, here: int
) -> None:
    this = NodeShape(8 * GIB, here, here * GIB)
    monkeypatch.setattr("raylight.trainer.cluster_fit.cluster_settings.this_machine", lambda: this)
    monkeypatch.setattr("raylight.engines.registry.has_vllm", lambda: here > 0)
    requested = replace(run_settings(**engine), learner=LearnerConfig(**learner))
    cluster = ClusterShape((NodeShape(64 * GIB, gpus, 24 * GIB),))
    role = plan_settings(GRPO(model=model), requested, RunnerConfig(), cluster).roles[1]
    assert role.gpus == 0
    assert "prefill of prompts" in {item.name for item in role.items}  # of transformers


def test_a_small_model_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, 8)
    monkeypatch.setattr(
        "raylight.trainer.cluster_fit.memory_plan.make_plan", lambda *_: pytest.fail("planned")
    )
    memory_check.check_memory(trained(str(STARTER_MODEL)))


def test_an_algorithm_without_learners_has_no_plan() -> None:
    @dataclass
    class Other:
        model: str = ""

    with pytest.raises(ConfigError, match="Other trains no model"):
        plan_settings(Other(), run_settings(), RunnerConfig(), ClusterShape((NodeShape(GIB),)))


def test_gpus_change_the_defaults(model: str) -> None:
    cluster = ClusterShape((NodeShape(64 * GIB, 2, 24 * GIB),))
    settings = (run_settings(kind="vllm"), RunnerConfig(), cluster)
    plan = plan_settings(GRPO(model=model), *settings)
    learner, engine = plan.roles[:2]
    assert (learner.gpus, engine.gpus) == (1, 1)
    assert plan.shortages == ()


def test_settings_for_cpus_replace_those_for_gpus(model: str) -> None:
    on_cpus, cluster = run_settings(kind="transformers"), ClusterShape((NodeShape(64 * GIB),))
    learner = LearnerConfig(num_gpus=0.6)
    settings = replace(on_cpus, learner=learner, cpu_fallback=on_cpus)
    roles = plan_settings(GRPO(model=model), settings, RunnerConfig(), cluster).roles
    assert [role.gpus for role in roles[:2]] == [0, 0]


@pytest.mark.slow
def test_the_doctor_names_what_the_machine_lacks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "this_machine", lambda: NodeShape(8 * GIB))
    (problem,) = report.memory_problems(model)
    assert problem.summary.startswith(
        "this machine cannot train the model: the processes of one machine need"
    )
    assert not problem.required


def test_a_plan_has_the_rollouts_in_flight_of_the_run(model: str) -> None:
    cluster = ClusterShape((NodeShape(64 * GIB, 2, 24 * GIB),))

    def logits(**algorithm: Any) -> int:
        settings = (run_settings(kind="vllm"), RunnerConfig(), cluster)
        engine = plan_settings(GRPO(model=model, **algorithm), *settings).roles[1]
        return next(item.size for item in engine.items if item.name == "logits")

    assert logits(tasks_per_step=32, group_size=8) == 2 * logits(tasks_per_step=8, group_size=8)
