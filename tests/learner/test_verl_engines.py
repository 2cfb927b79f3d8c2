"""Learner settings on a real engine: adapters, packing, memory, schedules, ranks."""

import json
import math
import shutil
from pathlib import Path

import engine_ranks
import pytest
import torch
from engine_ranks import LORA, MOVED, QUICK, SETTINGS, VARIANTS, all_updates
from rank_processes import run_ranks
from ranks import ANSWERS, PROBE, make_batch, plain_logprobs, plain_probe
from tiny_models import build_model
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.model import verl_engines
from raylight.quickstart import STARTER_MODEL
from raylight.weights.source import gather

ADAPTER_PARAMETERS = 14_592
"""Parameters of an adapter of rank 4 on the seven projections of the starter model's two layers."""

SAME = ("packed", "tight", "tight-no-sync", "replicated", "ulysses", "ulysses-split")
"""Variants with the update of "padded"."""
CLIPPED = ("learner/clip_fraction", "critic/vf_clipfrac")


pytestmark = pytest.mark.usefixtures("one_rank")


def make_policy(config=None, **settings):
    from raylight.learner.updates.policy import Policy

    torch.manual_seed(0)
    return Policy(
        STARTER_MODEL, LearnerConfig(**config or {}), PolicySettings(**SETTINGS | settings), total_steps=4
    )


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL)


@pytest.fixture(scope="module")
def batch(plain):
    with torch.no_grad():
        return make_batch([logprobs.tolist() for logprobs in plain_logprobs(plain)])


@pytest.fixture(scope="module")
def adapted(batch):
    policy = make_policy(LORA)
    policy.update(batch)
    return policy


def test_an_update_changes_the_adapter_only(batch):
    policy = make_policy(LORA)
    named = dict(policy.engine.module.named_parameters())
    assert sum(param.numel() for param in named.values() if param.requires_grad) == ADAPTER_PARAMETERS
    before = {name: gather(param).clone() for name, param in named.items()}
    policy.update(batch)
    changed = {name for name, param in named.items() if not torch.equal(gather(param), before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_the_merged_model_has_the_logprobs_of_the_adapted_one(adapted, plain):
    merged = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    weights = adapted.export()
    assert weights.keys() == plain.state_dict().keys()
    merged.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    expected = adapted.logprobs(PROBE)
    assert expected == pytest.approx(plain_probe(merged), rel=1e-5, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(expected, plain_probe(plain), strict=True)) > 1e-3


def test_the_policy_without_adapter_is_the_initial_model_and_stays_trainable(adapted, plain):
    with adapted.engine.disable_adapter():
        assert adapted.logprobs(PROBE) == pytest.approx(plain_probe(plain), rel=1e-5, abs=1e-5)
    params = adapted.engine.module.parameters()
    assert sum(param.numel() for param in params if param.requires_grad) == ADAPTER_PARAMETERS


def test_a_saved_policy_is_a_merged_model_and_an_adapter(adapted, tmp_path: Path):
    from peft import PeftModel

    from raylight.learner.model.weights import save_model

    folder = tmp_path / "saved"
    save_model(adapted.engine, str(folder))
    expected = adapted.logprobs(PROBE)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert plain_probe(merged) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    assert plain_probe(PeftModel.from_pretrained(base, folder / "adapter")) == pytest.approx(
        expected, rel=1e-5, abs=1e-5
    )
    config, arrays = adapted.export_adapter()
    assert json.loads(json.dumps(config))["r"] == 4
    assert sum(array.size for array in arrays.values()) == ADAPTER_PARAMETERS
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_an_earlier_version_of_the_adapter_is_saved_after_updates(batch, tmp_path: Path):
    from peft import PeftModel

    from raylight.engines.protocol import LoraAdapter
    from raylight.learner.model.weights import save_model

    policy = make_policy(LORA)
    policy.update(batch)
    expected, earlier = policy.logprobs(PROBE), LoraAdapter(*policy.export_adapter())
    policy.update(batch)
    now = policy.logprobs(PROBE)
    assert max(abs(a - b) for a, b in zip(expected, now, strict=True)) > 1e-3
    save_model(policy.engine, str(tmp_path / "saved"), earlier)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert plain_probe(merged) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    adapted = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter")
    assert plain_probe(adapted) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert policy.logprobs(PROBE) == now


def test_dropout_is_active_in_training_only(batch, plain):
    dropping = {"lora": {"rank": 4, "alpha": 8, "dropout": 0.5}}
    policy, same = make_policy(dropping), make_policy(LORA)
    assert policy.logprobs(PROBE) == pytest.approx(plain_probe(plain), rel=1e-5, abs=1e-5)
    metrics = policy.update(batch)
    assert metrics["mismatch/logprob_abs_max"] < 1e-4
    assert metrics["learner/grad_norm"] != pytest.approx(same.update(batch)["learner/grad_norm"], rel=1e-2)
    assert policy.logprobs(PROBE) == policy.logprobs(PROBE)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_models_own_dropout_is_not_part_of_the_policy(mini_batches, tmp_path, plain):
    """Weights stand still, so both passes must give the engine's log-probs: nothing is clipped."""
    from raylight.learner.updates.policy import Policy

    folder = tmp_path / "dropping"
    shutil.copytree(STARTER_MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.4}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        exact = make_batch([logprobs.tolist() for logprobs in plain_logprobs(plain)])
    settings = PolicySettings(lr=1e-12, mini_batches=mini_batches, max_logprob_mismatch=1e-4, grad_clip=1e6)
    metrics = Policy(str(folder), LearnerConfig(), settings, total_steps=4).update(exact)
    assert metrics["learner/clip_fraction"] == 0
    assert metrics["learner/ppo_kl"] == pytest.approx(0, abs=1e-6)
    without = Policy(STARTER_MODEL, LearnerConfig(), settings, total_steps=4).update(exact)
    assert metrics["learner/grad_norm"] == pytest.approx(without["learner/grad_norm"], rel=1e-4)


def test_every_dropout_of_a_model_is_found():
    from transformers import GPT2Config, GPT2LMHeadModel

    from raylight.learner.model.fsdp import disable_dropout

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.3, embd_pdrop=0.3, resid_pdrop=0.3)).train()
    ids = torch.arange(8)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout(model)
    torch.testing.assert_close(model(ids).logits, model.eval()(ids).logits)


def test_the_only_step_under_lora_dropout_has_the_ratio_one(batch):
    """Old log-probs of a pass without dropout of 0.5 would differ from the step's."""
    dropping = {"lora": {"rank": 4, "alpha": 8, "dropout": 0.5}}
    policy = make_policy(dropping, lr=0.05, max_logprob_mismatch=50.0)
    policy.update(batch)  # the adapter is no longer 0
    metrics = policy.update(make_batch([[-1.0] * len(answer) for answer in ANSWERS], version=1))
    assert metrics["learner/ppo_kl"] == 0
    assert metrics["learner/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which cannot"),
        ({"target_modules": ["lm_head"]}, "lm_head, which cannot"),
    ],
)
def test_layers_that_cannot_be_merged_raise(lora, message):
    with pytest.raises(ConfigError, match=message):
        make_policy({"lora": lora})


def test_modules_are_targeted_and_excluded():
    policy = make_policy(
        {
            "lora": {
                "rank": 4,
                "target_modules": ["q_proj", "v_proj"],
                "exclude_modules": ["layers.0.self_attn.v_proj"],
            }
        }
    )
    names = {
        name
        for name, param in policy.engine.module.named_parameters()
        if param.requires_grad and "lora_A" in name
    }
    assert sorted(name.split("layers.")[1].split(".lora")[0] for name in names) == [
        "0.self_attn.q_proj",
        "1.self_attn.q_proj",
        "1.self_attn.v_proj",
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"packed": True},
        {"packed": True, "attention": "eager"},
        {"max_tokens_per_micro_batch": 18},
        {"packed": True, "max_tokens_per_micro_batch": 40},
        {"gradient_checkpointing": True},
        {"param_offload": True, "optimizer_offload": True},
        *(
            pytest.param(config, marks=pytest.mark.slow("two ranks show it"))
            for config in (
                {"max_tokens_per_micro_batch": 18, "no_sync": True},
                {"fsdp_size": 1},
                {"packed": True, "ulysses": 1, "max_tokens_per_micro_batch": 9},
            )
        ),
    ],
    ids=[
        *("packed", "packed-eager", "split", "packed-split", "checkpointing", "offload"),
        *("no-sync", "replicated", "ulysses"),
    ],
)
def test_packing_and_memory_settings_do_not_change_the_update(config, batch):
    plain, other = make_policy(), make_policy(config)
    assert other.update(batch) == pytest.approx(plain.update(batch), rel=1e-4, abs=1e-5)
    assert other.logprobs(PROBE) == pytest.approx(plain.logprobs(PROBE), abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
def test_rows_that_a_state_joins_are_refused(model_type, dtype, tmp_path, monkeypatch):
    """The model's layers show it; without that rule, the log-probs of a row behind another one do."""
    layers = {"lfm2": {"layer_types": ["conv", "full_attention"]}, "qwen3_next": {}}
    path = build_model(model_type, tmp_path, **layers[model_type])
    config = LearnerConfig(packed=True, dtype=dtype)
    with pytest.raises(ConfigError, match=rf"\({model_type}\) keep a state"):
        verl_engines.build_reference(path, config)
    monkeypatch.setattr(verl_engines, "keeps_state", lambda config: False)
    with pytest.raises(ConfigError, match="model mixes packed rows"):
        verl_engines.build_reference(path, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma2"])
def test_rounding_is_not_taken_for_mixed_rows(model_type, dtype, tmp_path):
    """Masks separate the rows; windows, and experts, whose shapes depend on all rows, only round."""
    path = build_model(model_type, tmp_path)
    assert verl_engines.build_reference(path, LearnerConfig(packed=True, dtype=dtype, attention="eager"))


@pytest.mark.parametrize("lora", [pytest.param({}, marks=pytest.mark.slow), LORA], ids=["full", "lora"])
def test_bf16_is_close_to_fp32(lora, batch):
    exact, rough = make_policy(lora), make_policy({"dtype": "bfloat16", **lora}, max_logprob_mismatch=0.5)
    metrics = rough.update(batch)
    assert metrics["learner/grad_norm"] == pytest.approx(exact.update(batch)["learner/grad_norm"], rel=0.1)
    trained = {param.dtype for param in rough.engine.module.parameters() if param.requires_grad}
    assert trained == {torch.float32}


def test_offloaded_states_move_once_for_all_steps_of_an_update(batch, monkeypatch):
    policy = make_policy(mini_batches=2, ppo_epochs=2)
    policy.engine._is_offload_param = policy.engine._is_offload_optimizer = True
    moves = []
    monkeypatch.setattr(type(policy.engine), "to", lambda self, device, **parts: moves.append(parts))
    policy.update(batch)
    whole = {"model": True, "optimizer": True, "grad": True}
    assert moves.count(whole) == 2
    assert not any(parts["optimizer"] for parts in moves if parts != whole)


def test_offload_on_a_cpu_is_logged(caplog):
    make_policy({"optimizer_offload": True})
    assert "optimizer_offload: no effect without a GPU" in caplog.text


def test_missing_flash_attention_raises():
    with pytest.raises(ConfigError, match="needs a GPU and the package flash-attn"):
        make_policy({"attention": "flash_attention_2"})


def test_the_cosine_schedule_warms_up_and_decays():
    policy = make_policy(
        lr_schedule="cosine", lr_warmup_steps=1, min_lr_ratio=0.1, betas=(0.8, 0.9), weight_decay=0.3
    )
    optimizer = policy.engine.optimizer.param_groups[0]
    assert (optimizer["lr"], optimizer["betas"], optimizer["weight_decay"]) == (1e-3, (0.8, 0.9), 0.3)
    rates = [float(policy.engine.lr_scheduler_step()) for _ in range(4)]
    assert rates == pytest.approx([1e-3 * (0.55 + 0.45 * math.cos(math.pi * step / 3)) for step in range(4)])
    with pytest.raises(ConfigError, match="min_lr_ratio"):
        PolicySettings(min_lr_ratio=0.1)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_no_step_of_a_warm_up_has_the_rate_zero(schedule, batch):
    policy = make_policy(lr=1e-3, lr_schedule=schedule, lr_warmup_steps=3)
    optimizer, before = policy.engine.optimizer.param_groups[0], policy.logprobs(PROBE)
    rates = [optimizer["lr"]]
    policy.update(batch)
    assert policy.logprobs(PROBE) != before
    rates += [optimizer["lr"], *(float(policy.engine.lr_scheduler_step()) for _ in range(2))]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_do_not_change_the_update(batch):
    compiled, plain = make_policy({"torch_compile": True}), make_policy()
    assert compiled.update(batch) == pytest.approx(plain.update(batch), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "variants",
    [QUICK, pytest.param(VARIANTS, marks=pytest.mark.slow("one rank shows the others"))],
    ids=["quick", "all"],
)
def test_ranks_and_packing_do_not_change_the_update(variants):
    moved = {f"moved-{name}" for name in MOVED if name in variants}
    one = all_updates({"padded", *variants} - ({*SAME} - {*MOVED}))
    two = run_ranks(engine_ranks.main, 2, set(variants))[0]
    assert set(two) == {*variants, *moved}
    assert min(one["moved-padded"][name] for name in CLIPPED) > 0
    for variant, metrics in two.items():
        alone = one["padded" if variant in SAME else variant]
        for name, value in alone.items():
            tolerance = 1e-3 if name.startswith("probe/") else 1e-5
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=tolerance), (variant, name)
            if variant in moved:
                reference = one["moved-padded"][name]
                assert value == pytest.approx(reference, rel=1e-3, abs=tolerance), (variant, name)


@pytest.mark.parametrize("bypass_mode", [False, True])
def test_critic_warm_up_keeps_the_policy_and_still_measures_the_mismatch(bypass_mode, batch, plain):
    critic = {"lr": 1e-3, "warmup_steps": 1}
    policy = make_policy(adv_estimator="gae", critic=critic, bypass_mode=bypass_mode)
    metrics = policy.update(batch)
    assert metrics["mismatch/logprob_abs_max"] < 1e-4
    assert metrics["critic/grad_norm"] > 0
    assert "learner/grad_norm" not in metrics
    assert policy.logprobs(PROBE) == pytest.approx(plain_probe(plain), rel=1e-5, abs=1e-5)


def test_the_policys_schedule_starts_after_critic_warm_up():
    policy = make_policy(
        adv_estimator="gae",
        critic={"warmup_steps": 2},
        lr=1e-3,
        lr_warmup_steps=2,
        lr_schedule="cosine",
        max_logprob_mismatch=50.0,
    )
    policy.version = 5  # versions of a resumed run may have gaps
    seen = [
        policy.update(make_batch([[-1.0] * len(answer) for answer in ANSWERS], version=5 + i))
        for i in range(3)
    ]
    assert [metrics["learner/lr"] for metrics in seen] == pytest.approx([5e-4, 5e-4, 1e-3])
    assert ["learner/grad_norm" in metrics for metrics in seen] == [False, False, True]
