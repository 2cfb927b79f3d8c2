"""Memory plans of models of known sizes."""

from dataclasses import replace

import pytest
import torch

from raylight.config import EngineConfig, LearnerConfig, LoraConfig, RunnerConfig
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.trainer.cluster_fit.cluster_shape import GIB, ClusterShape, NodeShape
from raylight.trainer.cluster_fit.memory_plan import PlannedRun, _changes, _roles, make_plan
from raylight.trainer.cluster_fit.model_shape import (
    adapter_parameters,
    measure_activations,
    measure_prefill,
    read_config,
    read_shape,
)
from raylight.trainer.cluster_fit.role_needs import engine_memory
from raylight.trainer.spec.settings import ServingSettings

H100S = ClusterShape((NodeShape(1000 * GIB, 8, 80 * GIB),))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return the folder of a configuration with the sizes of Qwen2.5-7B."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("dense")
    Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return the folder of a small mixture-of-experts configuration."""
    return save_mixture(tmp_path_factory.mktemp("mixture"))


def save_mixture(folder, **settings):
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **settings,
    ).save_pretrained(folder)
    return str(folder)


def save_latent(folder):
    """Return the folder of a small configuration with the attention of DeepSeek-V2-Lite."""
    from transformers import DeepseekV3Config

    DeepseekV3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
    ).save_pretrained(folder)
    return str(folder)


def planned(path: str, settings: PolicySettings | None = None, **learner: object) -> PlannedRun:
    defaults = {
        "n": 4,
        "num_gpus": 1,
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "max_row_tokens": 8192,
    }
    return PlannedRun(
        path,
        EngineConfig(kind="vllm", num_gpus=1, replicas=4, dtype="bfloat16", max_model_len=8192),
        LearnerConfig(**defaults | learner),
        RunnerConfig(n=4),
        settings or PolicySettings(),
    )


def learner_items(run: PlannedRun) -> dict[str, int]:
    return {item.name: item.size for item in _roles(run, read_shape(run.model_path), H100S)[0].items}


def test_the_sizes_of_a_dense_model(dense):
    shape = read_shape(dense)
    assert shape.parameters == 7_615_616_512
    assert (shape.layers, shape.vocabulary, shape.hidden) == (28, 152064, 3584)
    assert shape.cache_per_token == 28 * 2 * 4 * 128
    assert shape.root == 2 * 152064 * 3584 + 3584
    assert shape.root + shape.layers * shape.layer == shape.parameters


def test_the_sizes_of_a_mixture_of_experts(mixture):
    shape = read_shape(mixture)
    assert shape.architecture == "Qwen3MoeForCausalLM"
    assert shape.layer > 8 * 3 * 64 * 32
    four, five = (measure_activations(mixture, 1, 64, torch.float32, layers) for layers in (4, 5))
    assert five > four > 0


def test_states_are_sharded(dense):
    one, four = learner_items(planned(dense, n=1)), learner_items(planned(dense, n=4))
    for name in ("policy weights", "policy gradients", "policy optimizer"):
        assert one[name] == pytest.approx(4 * four[name], rel=1e-6)
    assert one["policy optimizer"] == 8 * 7_615_616_512
    assert one["activations"] == four["activations"]


def test_checkpointing_saves_activations(dense):
    kept, recomputed = (
        learner_items(planned(dense, gradient_checkpointing=value))["activations"] for value in (False, True)
    )
    assert kept > 10 * recomputed


@pytest.mark.parametrize(("rows", "length", "gibibytes"), [(3, 512, 9.77), (1, 4096, 26.65)])
def test_short_rows_need_the_activations_of_all_layers(dense, rows, length, gibibytes):
    """The sizes are those of a trace of all 28 layers. The gradient of the embedding, 1 GiB, comes later."""
    assert measure_activations(dense, rows, length, torch.bfloat16, 28) / GIB == pytest.approx(
        gibibytes, 0.01
    )


def test_a_reference_and_a_critic_need_memory(dense):
    assert "reference weights" in learner_items(planned(dense, PolicySettings(kl_coef=0.1)))
    with_critic = learner_items(planned(dense, PolicySettings(adv_estimator="gae", critic=CriticSettings())))
    assert with_critic["critic optimizer"] == with_critic["policy optimizer"]
    assert "critic gradients" not in with_critic  # freed after the critic's update


def test_muon_keeps_one_moment_of_the_matrices_of_layers(dense):
    shape, adamw = read_shape(dense), learner_items(planned(dense, n=1))
    muon = learner_items(planned(dense, PolicySettings(optimizer="muon"), n=1))
    layer = 3584 * (3584 + 2 * 512 + 3584 + 3 * 18944)  # attention, and the three of the feed-forward part
    assert shape.matrices == 28 * layer
    assert adamw["policy optimizer"] - muon["policy optimizer"] == 4 * shape.matrices
    assert adamw["copy of the training state"] - muon["copy of the training state"] == 4 * shape.matrices


def test_what_vllm_keeps_free_for_a_step_is_not_its_cache(dense):
    engine = EngineConfig(kind="vllm", num_gpus=1, dtype="bfloat16", max_concurrent=128)

    def items(**args) -> dict[str, int]:
        run = replace(planned(dense), engine=engine.model_copy(update={"args": args}))
        return {item.name: item.size for item in make_plan(run, H100S).roles[1].items}

    kept = items()
    assert kept["logits"] == 3 * 4 * 128 * 152064
    assert kept["activations of a batch"] == measure_prefill(dense, 1, 8192, torch.bfloat16)
    shares = [size for name, size in kept.items() if name != "Python and libraries"]
    assert sum(shares) == int(0.92 * H100S.gpu_memory)
    assert items(max_num_batched_tokens=2048)["activations of a batch"] < kept["activations of a batch"]
    assert "CUDA graphs" not in items(enforce_eager=True)


@pytest.mark.parametrize(
    ("kind", "workers", "per_token"),
    [
        ("dense", {"tensor": 4}, 28 * 2 * 1 * 128 * 2),
        ("dense", {"tensor": 8}, 28 * 2 * 1 * 128 * 2),  # each of the four heads is on two workers
        ("dense", {"tensor": 8, "decode_context": 2}, 28 * 1 * 128 * 2),
        ("dense", {"tensor": 2, "pipeline": 3}, 10 * 2 * 2 * 128 * 2),
        ("latent", {"tensor": 8}, 4 * (512 + 64) * 2),  # the latent is on each worker
        ("latent", {"tensor": 2, "pipeline": 2}, 2 * (512 + 64) * 2),
    ],
)
def test_workers_divide_the_heads_and_layers_of_the_cache(tmp_path, request, kind, workers, per_token):
    path = request.getfixturevalue("dense") if kind == "dense" else save_latent(tmp_path)
    args = {f"{name}_parallel_size": count for name, count in workers.items()}
    engine = EngineConfig(kind="vllm", num_gpus=1, dtype="bfloat16", max_model_len=4096, args=args)
    role = engine_memory(path, read_shape(path), engine, 80 * GIB)
    cache = next(item.size for item in role.items if item.name == "key-value cache")
    assert role.room == cache // per_token


def test_a_teacher_needs_memory_and_gpus(dense):
    engine = EngineConfig(kind="vllm", num_gpus=1, dtype="bfloat16", args={"tensor_parallel_size": 2})
    plan = make_plan(replace(planned(dense), teachers=(ServingSettings(dense, engine),)), H100S)
    teacher = plan.roles[2]
    assert (teacher.role, teacher.processes, teacher.gpus) == ("teacher", 2, 1)
    assert {item.name: item.size for item in teacher.items}["weights"] == 7_615_616_512
    assert [shortage.what for shortage in plan.shortages] == ["GPUs"]  # 4 + 4 + 2 of 8
    on_cpu = EngineConfig(kind="transformers", max_concurrent=1, max_model_len=1024)
    plan = make_plan(replace(planned(dense), teachers=(ServingSettings(dense, on_cpu),)), H100S)
    items = {item.name: item.size for item in plan.roles[2].items}
    assert items["logits of a row"] == 3 * 4 * 1024 * 152064
    assert not plan.shortages


def test_a_teacher_without_room_for_a_sequence_does_not_fit(dense, mixture):
    half = {"gpu_memory_utilization": 0.5}  # 12 GiB of memory for 14 GiB of weights
    engine = EngineConfig(kind="vllm", num_gpus=1, dtype="bfloat16", max_model_len=4096, args=half)
    run = replace(planned(mixture), teachers=(ServingSettings(dense, engine),) * 2)
    (shortage,) = make_plan(run, ClusterShape((NodeShape(1000 * GIB, 10, 24 * GIB),))).shortages
    assert shortage.message.startswith("teacher: no room for one sequence of 4,096 tokens")
    assert "gpu_memory_utilization in args of its TeacherConfig" in shortage.message


@pytest.mark.parametrize(
    ("sleeps", "args", "idle"),
    [
        (True, {"enable_sleep_mode": True}, False),
        (True, {}, True),
        (False, {"enable_sleep_mode": True}, True),
    ],
)
def test_only_engines_that_sleep_free_their_memory(dense, sleeps, args, idle):
    engine = EngineConfig(
        kind="vllm",
        num_gpus=0.4,
        dtype="bfloat16",
        max_model_len=2048,
        sleep_while_learning=sleeps,
        args=args,
    )
    run = replace(planned(dense), engine=engine)
    role = make_plan(run, H100S).roles[1]
    assert (role.idle() == role.total("device")) == idle
    assert ("weights during sleep" in {item.name for item in role.items}) != idle


def test_teachers_and_reward_models_keep_their_memory(dense):
    scoring = EngineConfig(num_gpus=0.2, dtype="bfloat16", args={"max_batch_tokens": 4096})
    teacher = EngineConfig(kind="transformers", num_gpus=0.2, dtype="bfloat16", max_model_len=2048)
    model = ServingSettings(dense, teacher)
    run = replace(planned(dense), teachers=(model,), reward_models=(replace(model, engine=scoring),))
    for role in make_plan(run, H100S).roles[2:4]:
        assert role.idle() == role.total("device") > 14 * GIB
        assert role.idle(growing=False) == role.total("device", growing=False) < role.idle()


def test_a_teacher_on_the_learners_ranks_needs_memory_there(dense):
    run = planned(dense)
    settings = PolicySettings(adv_estimator="opd", divergence="js").with_local_teachers([dense])
    items = learner_items(replace(run, settings=settings))
    assert items["teacher weights"] == 2 * items["policy weights"] // 4  # bfloat16 of float32
    assert items["gathered output layer of the teacher"] == 2 * 152064 * 3584
    assert items["logits of the teacher"] >= 2 * 2**27
    assert "teacher" not in {role.role for role in make_plan(replace(run, settings=settings), H100S).roles}


def test_a_reward_model_needs_memory_and_gpus(dense):
    engine = EngineConfig(num_gpus=0.5, replicas=2, dtype="bfloat16", args={"max_batch_tokens": 4096})
    reward_models = (ServingSettings(dense, engine),)
    plan = make_plan(replace(planned(dense), reward_models=reward_models), H100S)
    role = plan.roles[2]
    assert (role.role, role.processes, role.gpus) == ("reward model", 2, 0.5)
    items = {item.name: item.size for item in role.items}
    body = 7_615_616_512 - 152064 * 3584  # without the output layer, with a head for one number
    labels = read_config(dense).num_labels
    assert items["weights"] == 2 * (body + labels * 3584)
    assert items["activations of a batch"] > measure_prefill(dense, 2, 2048, torch.bfloat16) / 2
    assert [shortage.what for shortage in plan.shortages] == ["GPUs"]  # 4 + 4 + 1 of 8


def test_on_a_cpu_tensors_that_come_and_go_leave_gaps(dense):
    items = learner_items(planned(dense, num_gpus=0))
    passing = ("gathered weights", "gradients to reduce", "activations", "logits")
    assert items["gaps between tensors"] == sum(items[name] for name in passing)
    assert "gaps between tensors" not in learner_items(planned(dense))


def test_the_weights_outside_of_layers_do_not_stay_gathered(dense):
    assert learner_items(planned(dense))["gathered weights"] == 2 * 3 * read_shape(dense).layer


def test_lora_trains_the_adapter_only(dense):
    adapter = adapter_parameters(dense, LoraConfig(rank=16))
    items = learner_items(planned(dense, PolicySettings(kl_coef=0.1), lora={"rank": 16}))
    assert items["policy optimizer"] == 2 * adapter * 4 // 4
    assert "reference weights" not in items


def test_a_run_that_fits_needs_no_change(dense):
    plan = make_plan(planned(dense), H100S)
    assert plan.shortages == ()
    assert plan.remedies == ()


def test_the_remedies_make_the_run_fit(dense):
    run = planned(dense, gradient_checkpointing=False)
    plan = make_plan(run, H100S)
    assert [shortage.what for shortage in plan.shortages] == ["GPU memory"]
    assert plan.remedies == ("learner.gradient_checkpointing=true",)
    assert make_plan(planned(dense), H100S).shortages == ()


def test_only_needed_changes_are_named(dense):
    plan = make_plan(planned(dense, n=1), H100S)
    assert plan.remedies == ("learner.n=4",)


@pytest.mark.parametrize(
    ("settings", "learner", "remedies"),
    [
        ({}, {}, ("learner.lora.rank=16",)),
        ({"optimizer": "muon"}, {}, ()),
        ({}, {"train_vision": True}, ()),
    ],
)
def test_no_adapter_is_a_remedy_where_learners_refuse_it(dense, settings, learner, remedies):
    run = planned(dense, PolicySettings(**settings), n=1, **learner)
    small = ClusterShape((NodeShape(1000 * GIB, 5, 48 * GIB),))
    assert make_plan(run, small).remedies == remedies


@pytest.mark.parametrize("role", ["teachers", "reward_models"])
def test_a_remedy_leaves_gpus_to_models_that_score(dense, role):
    engine = EngineConfig(
        kind="vllm", num_gpus=1, replicas=2, dtype="bfloat16", args={"max_batch_tokens": 64}
    )
    run = replace(planned(dense, n=1), **{role: (ServingSettings(dense, engine),)})
    assert make_plan(run, H100S).remedies == ("learner.n=2",)


def test_learners_keep_copies_of_their_training_state(dense):
    items = learner_items(planned(dense))
    assert items["copy of the training state"] == 12 * 7_615_616_512 // 4
    critic = PolicySettings(adv_estimator="gae", critic=CriticSettings())
    assert learner_items(planned(dense, critic))["copy of the training state"] == 24 * 7_615_616_512 // 4


@pytest.mark.parametrize(
    ("learner", "size"),
    [
        ({}, 2 * 7_615_616_512 // 4),
        ({"lora": {"rank": 16}}, 0),
        ({"lora": {"rank": 16, "serve": "merged"}}, 2 * 7_615_616_512 // 4),
    ],
)
def test_learners_keep_a_snapshot_of_what_they_send_beside_updates(dense, learner, size):
    overlapping = PolicySettings(max_staleness=1)
    items = learner_items(planned(dense, overlapping, **learner))
    assert items["snapshot of the weights"] == pytest.approx(size, rel=0.03)
    assert "snapshot of the weights" not in learner_items(planned(dense, **learner))


def test_offloaded_weights_are_on_the_gpu_while_they_compute(dense):
    kept, offloaded = (
        make_plan(planned(dense, param_offload=value, optimizer_offload=value), H100S).roles[0]
        for value in (False, True)
    )
    assert offloaded.total("device") == kept.total("device")
    assert offloaded.total("host") == kept.total("host") + 12 * 7_615_616_512 // 4
    assert (kept.idle() > 20 * GIB, offloaded.idle() < 2 * GIB) == (True, True)


def test_remedies_leave_gpus_to_engines_and_keep_groups_of_ranks(dense):
    run = replace(
        planned(dense, n=2, fsdp_size=2),
        engine=EngineConfig(kind="vllm", num_gpus=1, dtype="bfloat16", args={"tensor_parallel_size": 3}),
    )
    (change,) = [change for change in _changes(run, H100S) if "learner.n" in change.values]
    assert change.values == {"learner.n": 4}


def test_shorter_micro_batches_come_with_shorter_rollouts(dense):
    (first, *_) = [
        change
        for change in _changes(planned(dense, max_row_tokens=None), H100S)
        if "learner.max_tokens_per_micro_batch" in change.values
    ][1:]
    assert first.values == {"engine.max_model_len": 4096, "learner.max_tokens_per_micro_batch": 4096}


def test_fewer_sequences_make_the_cache_of_transformers_fit(dense):
    engine = EngineConfig(kind="transformers", num_gpus=1, dtype="bfloat16", max_model_len=16384)
    run = replace(planned(dense), engine=engine)
    assert make_plan(run, H100S).remedies == ("engine.max_concurrent=32",)


def test_replicas_count_up_to_their_largest_number(dense):
    settings = {"num_gpus": 1, "max_replicas": 3, "dtype": "bfloat16", "max_model_len": 8192}
    engine = EngineConfig(kind="transformers", **settings)
    run = replace(planned(dense), engine=engine)
    (_, memory, *_) = make_plan(run, H100S).roles
    assert memory.processes == 3
    assert {item.name for item in memory.items} >= {"prefill of prompts", "logits", "key-value cache"}


def test_an_engine_without_room_for_its_cache_does_not_fit(dense):
    plan = make_plan(planned(dense), ClusterShape((NodeShape(1000 * GIB, 8, 16 * GIB),)))
    assert "key-value cache" in [shortage.what for shortage in plan.shortages]


def test_an_unknown_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="'vit'"):
        read_shape(str(tmp_path))


def test_router_replay_needs_memory_for_routes(tmp_path):
    """vLLM keeps room for the layers without experts too."""
    path = save_mixture(tmp_path, mlp_only_layers=[0])
    assert read_shape(path).route_bytes == 3 * 8  # layers with experts, experts of a token, a byte each
    settings = {"max_model_len": 128, "max_concurrent": 8, "args": {"record_routes": True}}
    engine = EngineConfig(kind="transformers", **settings)
    run = replace(planned(path, router_replay=True), engine=engine)
    learner, engine_role = make_plan(run, H100S).roles[:2]
    assert next(item.size for item in learner.items if item.name == "routes of a pass") == 16384 * 24 * 8
    name = "routes of experts, 24 bytes a token"
    assert next(item.size for item in engine_role.items if item.name == name) == (8 + 2) * 128 * 24
    engine = EngineConfig(kind="vllm", num_gpus=1, args={"enable_return_routed_experts": True})
    run = replace(planned(path, router_replay=True), engine=engine)
    engine_role = make_plan(run, H100S).roles[1]
    name = "routes of experts, 32 bytes a token"
    routes = next(item for item in engine_role.items if item.name == name)
    assert routes.size == engine_role.room * 32
    assert routes.place == "host"
