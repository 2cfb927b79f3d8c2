"""Defaults that follow the hardware: what each cluster gets, and that explicit settings win."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_settings import KnownFacts, policy_settings, served_settings
from safetensors.torch import save_file
from tiny_vlms import build_vlm

import raylight as rl
from raylight.algorithms.teacher import TeacherConfig
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
from raylight.errors import ConfigError
from raylight.trainer.cluster_fit import cluster_settings, hardware
from raylight.trainer.cluster_fit.cluster_settings import fit_hardware, fit_served
from raylight.trainer.cluster_fit.cluster_shape import NodeShape
from raylight.trainer.cluster_fit.hardware import (
    ClusterFacts,
    Hardware,
    Workload,
    choose,
    connected_hardware,
    fit_engine,
    longest_sequence,
    share_cores,
    workload,
)
from raylight.trainer.spec.settings import RewardModelSettings, ServedTeacher, ServingSettings

CONTEXT = 32_768
ENGINE_ON_GPU = {"dtype": "bfloat16", "max_model_len": 16_384}


def changed(before: Any, after: Any) -> dict[str, Any]:
    """Return the settings that differ."""
    old, new = before.model_dump(), after.model_dump()
    return {name: value for name, value in new.items() if value != old[name]}


def choice(
    gpus: float,
    learner: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    context: int | None = CONTEXT,
    packs: bool = False,
    keeps_state: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    given = EngineConfig(**{"kind": "vllm"} | (engine or {})), LearnerConfig(**learner or {})
    found = choose(Hardware(gpus, cpus=24), *given, Workload(context, packs=packs, keeps_state=keeps_state))
    return changed(given[1], found.learner), changed(given[0], found.engine), found.notes


ON_GPU = {"dtype": "bfloat16", "gradient_checkpointing": True, "num_threads": 8}
SHARED_LEARNER = {
    "num_gpus": 0.6,
    "param_offload": True,
    "optimizer_offload": True,
    **ON_GPU,
}
SHARED_ENGINE = {
    "num_gpus": 0.4,
    "sleep_while_learning": True,
    "args": {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True},
} | ENGINE_ON_GPU
OWN_LEARNER = {"num_gpus": 1, **ON_GPU}
OWN_ENGINE = {"num_gpus": 1} | ENGINE_ON_GPU


@pytest.mark.parametrize(
    ("gpus", "learner", "engine", "expected_learner", "expected_engine"),
    [
        # no GPU: nothing changes
        (0, {}, {}, {}, {}),
        # one GPU, of whatever size: shared
        (1, {}, {}, SHARED_LEARNER, SHARED_ENGINE),
        (1, {"n": 1}, {"replicas": 1, "dtype": "float16"}, SHARED_LEARNER, SHARED_ENGINE | {"dtype": ...}),
        # eight GPUs
        (8, {}, {}, OWN_LEARNER, OWN_ENGINE),
        (8, {"n": 4}, {"replicas": 4}, OWN_LEARNER, OWN_ENGINE),
        (8, {"n": 8}, {"replicas": 8}, SHARED_LEARNER, SHARED_ENGINE),
        (8, {"n": 8}, {"args": {"tensor_parallel_size": 8}}, SHARED_LEARNER, ...),
        # one learner, and a worker for each GPU: no two workers fit on one
        (
            2,
            {},
            {"args": {"tensor_parallel_size": 2}},
            SHARED_LEARNER | {"num_gpus": 0.4},
            SHARED_ENGINE
            | {
                "num_gpus": 0.6,
                "args": {
                    "tensor_parallel_size": 2,
                    "gpu_memory_utilization": 0.6,
                    "enable_sleep_mode": True,
                },
            },
        ),
        # two nodes of eight
        (16, {"n": 8}, {"replicas": 4, "args": {"tensor_parallel_size": 2}}, OWN_LEARNER, OWN_ENGINE),
        # explicit settings win
        (8, {"num_gpus": 0}, {"num_gpus": 0}, {}, {}),
        (8, {"num_gpus": 0}, {}, {}, OWN_ENGINE),
        (8, {}, {"num_gpus": 1}, OWN_LEARNER, ENGINE_ON_GPU),
        (
            8,
            {"dtype": "float32", "gradient_checkpointing": False},
            {},
            {"num_gpus": 1, "num_threads": 8},
            OWN_ENGINE,
        ),
        (8, {}, {"dtype": "float32", "max_model_len": 512}, OWN_LEARNER, {"num_gpus": 1}),
        # an explicit GPU is on a node that has yet to start
        (
            0,
            {"num_gpus": 1},
            {"num_gpus": 1},
            ON_GPU,
            ENGINE_ON_GPU,
        ),
        # the rest of GPUs that the other side takes a share of; two shares above a half are on two GPUs
        (1, {"num_gpus": 0.6}, {}, SHARED_LEARNER | {"num_gpus": ...}, SHARED_ENGINE),
        (3, {"n": 3, "num_gpus": 0.6}, {}, SHARED_LEARNER | {"num_gpus": ...}, SHARED_ENGINE),
        (8, {"n": 8, "num_gpus": 0.6}, {"replicas": 3}, SHARED_LEARNER | {"num_gpus": ...}, SHARED_ENGINE),
        (8, {"n": 4, "num_gpus": 0.6}, {"replicas": 4}, ON_GPU, OWN_ENGINE),
        (8, {}, {"replicas": 8, "num_gpus": 0.6}, SHARED_LEARNER | {"num_gpus": 0.4}, ...),
        (4, {"n": 2}, {"replicas": 4, "num_gpus": 0.4}, OWN_LEARNER, ...),
        (4, {"n": 2}, {"replicas": 4, "num_gpus": 0.6}, {}, ...),
        # taken GPUs
        (1, {}, {"num_gpus": 1}, {}, ENGINE_ON_GPU),
        (1, {"num_gpus": 1}, {}, ON_GPU, {}),
        # shares of the user: the engine's share of the memory follows
        (
            1,
            {"num_gpus": 0.7},
            {"num_gpus": 0.3},
            ON_GPU,
            ENGINE_ON_GPU | {"args": {"gpu_memory_utilization": 0.3}},
        ),
        (
            1,
            {"num_gpus": 0.7},
            {"num_gpus": 0.3, "args": {"gpu_memory_utilization": 0.5}},
            ON_GPU,
            ENGINE_ON_GPU,
        ),
        # an engine of the user's own decides itself
        (8, {}, {"kind": "package.module:Engine"}, OWN_LEARNER, {}),
    ],
)
def test_the_defaults_of_a_cluster(
    gpus: float, learner: dict, engine: dict, expected_learner: dict, expected_engine: Any
) -> None:
    found_learner, found_engine, _ = choice(gpus, learner, engine)
    assert found_learner == {name: value for name, value in expected_learner.items() if value is not ...}
    if expected_engine is not ...:
        assert found_engine == {name: value for name, value in expected_engine.items() if value is not ...}


def can_place(gpus: int, shares: list[float]) -> bool:
    """Return True if Ray can place processes, each where the least is left."""
    free = [1.0] * gpus
    for share in sorted(shares, reverse=True):
        fitting = [i for i in range(gpus) if free[i] + 1e-9 >= share]
        if not fitting:
            return False
        free[min(fitting, key=free.__getitem__)] -= share
    return True


@pytest.mark.parametrize("gpus", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("given", [({}, {}), ({"num_gpus": 0.6}, {}), ({}, {"num_gpus": 0.6})])
def test_each_process_has_its_gpu(gpus: int, given: tuple[dict, dict]) -> None:
    for ranks, workers in itertools.product((1, 2, 3, 4, 8), repeat=2):
        learner = LearnerConfig(n=ranks, **given[0])
        engine = EngineConfig(kind="vllm", replicas=workers, **given[1])
        asked = [learner.num_gpus] * ranks + [engine.num_gpus] * workers
        if not can_place(gpus, asked):
            continue
        try:
            found = choose(Hardware(gpus), engine, learner, Workload(CONTEXT))
        except ConfigError:
            assert not any(asked)
            continue
        assert found.learner is not None
        assert can_place(gpus, [found.learner.num_gpus] * ranks + [found.engine.num_gpus] * workers)


@pytest.mark.parametrize(
    ("learner", "packs", "packed"),
    [
        ({}, True, True),
        ({"attention": "flash_attention_2"}, False, True),
        ({}, False, False),
        ({"dtype": "float32"}, True, False),
        ({"attention": "sdpa"}, True, False),
    ],
)
def test_rows_are_packed_where_a_kernel_keeps_them_apart(learner: dict, packs: bool, packed: bool) -> None:
    found, _, _ = choice(8, learner, packs=packs)
    assert found.get("packed", False) == packed


def test_rows_that_a_state_joins_are_not_packed_by_default() -> None:
    found, _, _ = choice(8, {"attention": "flash_attention_2"}, keeps_state=True)
    assert not found.get("packed", False)


@pytest.mark.parametrize(
    ("context", "learner", "length"),
    [(None, {}, 16_384), (4096, {}, 4096), (131_072, {}, 16_384), (131_072, {"max_row_tokens": 8000}, 8000)],
)
def test_the_context_is_the_models_within_bounds(context: int | None, learner: dict, length: int) -> None:
    _, engine, _ = choice(8, learner, context=context)
    assert engine["max_model_len"] == length


@pytest.mark.parametrize(
    ("kept", "memory", "ranks", "offloads"),
    [
        (8, 140, 1, False),  # 0.5B on an H200
        (122, 140, 1, True),  # 7.6B
        (122, 80, 8, False),  # 7.6B on eight GPUs
        (25, 24, 1, True),  # 1.5B on 24 GB
        (9, 24, 1, False),
        (None, 140, 1, True),  # weights that are not there yet
    ],
)
def test_states_are_offloaded_only_if_they_do_not_fit_beside_a_sampling_engine(
    kept: int | None, memory: int, ranks: int, offloads: bool
) -> None:
    found = choose(
        Hardware(ranks, gpu_memory=memory * 2**30),
        EngineConfig(kind="vllm", replicas=ranks),
        LearnerConfig(n=ranks),
        Workload(CONTEXT, None if kept is None else kept * 2**30),
    ).learner
    assert (found.param_offload, found.optimizer_offload) == (offloads, offloads)


def test_engines_that_sample_during_updates_stay_awake() -> None:
    config = EngineConfig(kind="vllm")
    found = choose(Hardware(1), config, LearnerConfig(), Workload(CONTEXT, overlaps=True))
    assert changed(config, found.engine) == {
        **{name: value for name, value in SHARED_ENGINE.items() if name != "sleep_while_learning"},
        "args": {"gpu_memory_utilization": 0.4},
    }


def test_the_workload_counts_what_learners_keep(tmp_path: Path) -> None:
    assert workload(tmp_path, None, None) == Workload()
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    save_file({"a": torch.zeros(10, 10), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    plain, lora = rl.GRPO(model="m").policy_settings(), {"rank": 8}
    assert workload(tmp_path, plain, LearnerConfig()) == Workload(77, 16 * 107)
    assert workload(tmp_path, plain, LearnerConfig(lora=lora)) == Workload(77, 2 * 107)
    fp32 = LearnerConfig(lora=lora, dtype="float32")
    assert workload(tmp_path, plain, fp32) == Workload(77, 4 * 107)
    with_reference = rl.GRPO(model="m", kl_coef=0.1, max_staleness=1).policy_settings()
    assert workload(tmp_path, with_reference, LearnerConfig()) == Workload(77, 18 * 107, True)
    assert workload(tmp_path, rl.PPO(model="m").policy_settings(), LearnerConfig()).kept_bytes == 32 * 107
    distilled = plain.with_local_teachers([str(tmp_path), str(tmp_path)])
    assert workload(tmp_path, distilled, LearnerConfig()).kept_bytes == (16 + 2 + 2) * 107
    unknown = plain.with_local_teachers([str(tmp_path), str(tmp_path / "none")])
    assert workload(tmp_path, unknown, LearnerConfig()).kept_bytes is None


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen3_next"}, False),
        ({"model_type": "gpt_oss"}, False),
        ({}, False),
        ({"model_type": "olmo3", "layer_types": ["sliding_attention", "full_attention"]}, True),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, True),
        ({"model_type": "qwen3", "text_config": None}, True),
        ({"model_type": "llama", "layer_types": ["linear_attention", "full_attention"]}, False),
        ({"model_type": "llama", "attention_dropout": 0.1}, False),
        ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 8}, False),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, True),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, False),
        ({"model_type": "qwen2_moe", "use_sliding_window": False}, True),
    ],
)
def test_rows_of_a_model_are_packed_if_its_layers_keep_them_apart(
    config: dict, packs: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert workload(tmp_path, None, None).packs == packs


def test_rows_with_images_are_packed_if_they_can_be(tmp_path: Path) -> None:
    assert workload(Path(build_vlm("internvl", tmp_path / "internvl")), None, None).packs
    qwen = Path(build_vlm("qwen2_5_vl", tmp_path / "qwen"))
    nested = workload(qwen, None, None)
    assert nested.packs
    config = json.loads((qwen / "config.json").read_text())
    (qwen / "config.json").write_text(json.dumps(config.pop("text_config") | config))  # as published
    assert workload(qwen, None, None) == nested
    folder = Path(build_vlm("gemma3", tmp_path / "gemma3"))
    assert not workload(folder, None, None).packs
    (folder / "preprocessor_config.json").write_text("{")  # the model is read as one of text alone
    assert workload(folder, None, None).packs


def test_too_few_gpus_are_refused_with_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"8 learner\(s\) \(learner.n\) and 2 engine worker") as caught:
        choice(4, {"n": 8}, {"replicas": 2})
    assert "engine.replicas" in str(caught.value)


def test_more_workers_than_learners_cannot_be_paired() -> None:
    """Two of four workers of 0.4 GPUs would get the same GPU."""
    with pytest.raises(ConfigError, match="have as many learners as workers"):
        choice(4, {"n": 2}, {"args": {"tensor_parallel_size": 4}})


@pytest.mark.parametrize(
    ("gpus", "learner", "engine", "message"),
    [
        (1, {}, {}, "learners and engines share GPUs"),
        (1, {}, {"num_gpus": 1}, "the learners compute on CPUs, because the engines take the GPUs"),
        (1, {"num_gpus": 1}, {}, "the engine computes on a CPU, because the learners take the GPUs"),
        (
            8,
            {},
            {},
            "1 for each learner (bfloat16, gradient checkpointing), 1 for each engine worker (bfloat16",
        ),
    ],
)
def test_what_the_hardware_is_used_for_is_said(
    gpus: float, learner: dict, engine: dict, message: str
) -> None:
    assert any(message in note for note in choice(gpus, learner, engine)[2])


def test_a_cluster_without_gpus_needs_no_message() -> None:
    assert choice(0)[2] == ()


def test_an_engine_without_learners_takes_a_gpu() -> None:
    engine = EngineConfig(kind="vllm")
    found = choose(Hardware(2), engine, None, Workload(CONTEXT))
    assert changed(engine, found.engine) == OWN_ENGINE
    assert found.learner is None


def test_the_longest_sequence_is_read_from_the_models_folder(tmp_path: Path) -> None:
    assert longest_sequence(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert longest_sequence(tmp_path) == 77
    (tmp_path / "config.json").write_text("{}")
    assert longest_sequence(tmp_path) is None


@pytest.mark.parametrize(
    ("nodes", "cuda", "gpus"),
    [([], True, 0), ([0.0], True, 0), ([0.0, 4.0], True, 1), ([4.0], False, 0)],
    ids=["no-node", "cpu-only", "cpu-driver-and-gpu-worker", "torch-for-cpus"],
)
def test_the_plan_of_a_run_follows_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[float], cuda: bool, gpus: float
) -> None:
    known = [
        {"Alive": True, "NodeID": str(i), "NodeManagerAddress": f"10.0.0.{i}", "Resources": {"GPU": amount}}
        for i, amount in enumerate(nodes)
    ]
    asked: list[Any] = []

    def ask(addresses: dict[str, str], question: Any) -> dict[str, Any]:
        asked.append(addresses)
        answers = {hardware.torch_uses_gpus: cuda, hardware.this_machine: NodeShape(2**34, 1, 2**34)}
        return dict.fromkeys(addresses.values(), answers.get(question, False))

    monkeypatch.setattr(hardware.ray, "nodes", lambda: known)
    monkeypatch.setattr(hardware, "ask_nodes", ask)
    settings = served_settings(str(tmp_path), EngineConfig(kind="transformers"))
    found = fit_engine(connected_hardware(), settings.serving, EngineConfig())
    assert found.engine.num_gpus == gpus
    assert bool(found.notes) == bool(gpus)
    if not gpus:
        assert found.engine == settings.serving.engine
    assert all(list(addresses) == [str(len(nodes) - 1)] for addresses in asked)


@pytest.mark.parametrize(
    ("gpus", "teacher_has", "expected"),
    [
        (3.0, {"num_gpus": 1}, (1, 1)),
        (2.0, {"num_gpus": 1}, (0.6, 0.4)),
        (4.0, {"num_gpus": 0.6, "replicas": 3}, (0.6, 0.4)),
        (4.0, {"num_gpus": 0.5, "replicas": 4}, (1, 1)),
    ],
)
def test_the_gpus_of_a_teacher_or_a_reward_model_are_its_own(
    tmp_path: Path, gpus: float, teacher_has: dict, expected: tuple[float, float]
) -> None:
    teacher = ServingSettings("t", EngineConfig(kind="transformers", **teacher_has), "teacher")
    engine = EngineConfig(kind="transformers")
    settings = policy_settings(
        str(tmp_path),
        engine,
        training={"teachers": {"t": ServedTeacher(TeacherConfig(model="t"), teacher)}},
    )
    found, _ = fit_hardware(settings, engine, KnownFacts(gpus))
    assert (found.training.learner.num_gpus, found.serving.engine.num_gpus) == expected
    model = RewardModelSettings(rl.rewards.reward_model("t"), teacher)
    with_reward, _ = fit_hardware(
        policy_settings(str(tmp_path), engine, reward_models=(model,)), engine, KnownFacts(gpus)
    )
    assert with_reward.training.learner == found.training.learner


@pytest.mark.parametrize(
    ("kind", "tasks", "given", "engine", "runner"),
    [
        ("vllm", 4, {}, 128, 64),
        ("vllm", 40, {}, 160, 160),
        ("vllm", 400, {}, 1024, 256),
        ("vllm", 40, {"max_concurrent": 5}, 5, 5),
        ("transformers", 40, {}, 128, 160),
    ],
)
def test_the_rollouts_of_a_step_are_in_flight_at_once(
    tmp_path: Path,
    kind: str,
    tasks: int,
    given: dict,
    engine: int,
    runner: int,
) -> None:
    config = EngineConfig(kind=kind, replicas=2, **given)
    settings = policy_settings(
        str(tmp_path),
        config,
        runner=RunnerConfig(n=2, **given),
        training={"algorithm": rl.GRPO(model="m", tasks_per_step=tasks, group_size=8)},
    )
    found, _ = fit_hardware(settings, config, KnownFacts(3))
    assert (found.serving.engine.max_concurrent, found.runner.max_concurrent) == (engine, runner)


def test_an_upstream_has_no_hardware(tmp_path: Path) -> None:
    engine = EngineConfig(kind="upstream", url="http://other/v1")
    settings = served_settings(str(tmp_path), engine)
    assert fit_served(settings, engine, ClusterFacts()) == (settings, ())


@pytest.mark.parametrize(
    ("parameters", "engine", "learner", "overlaps", "expected"),
    [
        (2e7, {}, {}, False, (8, 8)),
        (2e7, {}, {}, True, (4, 4)),
        (2e7, {"replicas": 2}, {"n": 2}, False, (4, 4)),
        (2e7, {"replicas": 3}, {"n": 1}, True, (2, 2)),
        (2e7, {"replicas": 20}, {"n": 20}, True, (1, 1)),
        # with a GPU each has its own threads, and the other computes alone
        (2e7, {"num_gpus": 1}, {}, True, (None, 8)),
        (2e7, {}, {"num_gpus": 1}, True, (8, None)),
        (2e7, {"kind": "package.module:Engine"}, {}, True, (None, 8)),
        # settings of the user, and small models
        (2e7, {"num_threads": 3}, {"num_cpus": 2}, False, (3, None)),
        (1e6, {}, {}, False, (None, None)),
    ],
)
def test_learners_and_engines_take_turns_on_all_cores_or_share_them(
    parameters: float, engine: Any, learner: Any, overlaps: bool, expected: tuple[int | None, int | None]
) -> None:
    configs = EngineConfig(**{"kind": "transformers"} | engine), LearnerConfig(**learner)
    found = share_cores(8, int(parameters), *configs, overlaps)
    assert tuple(config.num_threads for config in found) == expected


@pytest.mark.parametrize(
    ("gpus", "kind", "given", "expected"),
    [
        (0, "transformers", {}, {"num_threads": 2}),
        (0, "transformers", {"num_cpus": 2}, {}),
        (0, "transformers", {"replicas": 2}, {"num_threads": 1}),
        (2, "vllm", {}, {"num_gpus": 1} | ENGINE_ON_GPU),
        (2, "vllm", {"num_gpus": 0}, {"num_threads": 2}),
    ],
)
def test_a_fixed_model_has_a_gpu_or_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, kind: str, given: Any, expected: Any
) -> None:
    """`raylight serve`, `raylight eval` and prompt optimisation serve one."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT}))
    monkeypatch.setattr(cluster_settings, "count_parameters", lambda folder: 135_000_000)
    engine = EngineConfig(kind=kind, **given)
    settings = served_settings(str(tmp_path), engine)
    found, _ = fit_served(settings, engine, KnownFacts(gpus))
    assert changed(engine, found.serving.engine) == expected
