"""Mixtures of experts on a real engine: updates, exported names, saved models."""

from __future__ import annotations

import moe_ranks
import pytest
import torch
from moe_ranks import train_and_save
from rank_processes import run_ranks
from ranks import plain_probe
from safetensors.torch import load_file
from tiny_models import MOE, build_model
from transformers import AutoModelForCausalLM

from raylight.algorithms.policy_gradient import GSPO
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import TrainBatch
from raylight.learner.model.model_check import read_shapes
from raylight.types import Trajectory
from raylight.weights.source import WeightSource

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("model_type", MOE)
def test_a_trained_mixture_is_saved_as_its_files_were_and_computes_the_same(
    model_type, tmp_path, monkeypatch
):
    monkeypatch.setattr("raylight.learner.model.weights.SHARD_BYTES", 50_000)
    model = build_model(model_type, tmp_path / "model")
    result = train_and_save(model, tmp_path / "saved", 1)
    assert "experts" in result["changed"]
    assert not result["unchanged"]
    assert read_shapes(str(tmp_path / "saved")) == read_shapes(str(tmp_path / "model"))
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert plain_probe(saved) == pytest.approx(result["probe"], abs=1e-4)


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", pytest.param("qwen3_moe", marks=pytest.mark.slow("it has no shared experts"))]
)
def test_an_adapter_leaves_the_experts_alone(model_type, tmp_path):
    """Shared experts have the layer names of experts, which peft would adapt too."""
    model = build_model(model_type, tmp_path / "model", num_hidden_layers=8)
    result = train_and_save(model, tmp_path / "saved", 1, lora={"rank": 4})
    assert result["changed"] == {"q_proj", "k_proj", "v_proj", "o_proj"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert plain_probe(saved) == pytest.approx(result["probe"], abs=1e-4)


def test_experts_cannot_be_adapted(tmp_path):
    model = build_model("qwen3_moe", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"mlp\.experts, which cannot be adapted"):
        train_and_save(model, tmp_path / "saved", 1, lora={"target_modules": ["gate_proj", "up_proj"]})


PACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_moe", "gpt_oss"),
        *(
            pytest.param(model_type, marks=pytest.mark.slow("its experts have the form of qwen3_moe's"))
            for model_type in ("qwen3_next", "qwen2_moe", "mixtral", "olmoe")
        ),
    ],
)
def test_an_adapter_of_packed_experts_is_merged_and_saved(model_type, tmp_path):
    """Its answers match peft, and weights to which each expert's update is added by hand."""
    from peft import PeftModel

    model = build_model(model_type, tmp_path / "model")
    lora = {"rank": 3, "alpha": 12, "target_modules": ["q_proj"], "target_parameters": PACKED}
    result = train_and_save(model, tmp_path / "saved", 1, lora=lora, gradient_checkpointing=True)
    assert result["changed"] == {"q_proj", "experts"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert plain_probe(saved) == pytest.approx(result["probe"], abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = plain_probe(plain)
    adapter = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    assert add_by_hand(plain, adapter, scale=4.0) >= 2 * len(PACKED) + 1
    assert plain_probe(plain) == pytest.approx(result["probe"], abs=1e-5)
    assert plain_probe(plain) != pytest.approx(base, abs=1e-3)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "saved" / "adapter")
    assert plain_probe(loaded) == pytest.approx(result["probe"], abs=1e-5)


def add_by_hand(model: torch.nn.Module, adapter: dict[str, torch.Tensor], scale: float) -> int:
    """Add an adapter to a model, expert by expert; return the number of parameters that it changes."""
    found = 0
    for name, down in adapter.items():
        path, matrix, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if not matrix:
            continue
        up, layer = (
            adapter[name.replace("lora_A", "lora_B")],
            model.get_submodule(path.partition(".base_")[0]),
        )
        found += 1
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data += scale * up @ down
            continue
        experts, rank = layer.num_experts, len(down) // layer.num_experts
        # peft wraps the first parameter first, which the second then contains as base_layer
        param = layer.gate_up_proj if path.endswith(".base_layer") else layer.down_proj
        for e in range(experts):
            delta = scale * up[:, e::experts] @ down[e * rank : (e + 1) * rank]
            param.data[e] += delta.T if layer.is_transposed else delta
    return found


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mlp.experts.up_proj"], "match no packed experts of the model; name some of"),
        (["mlp.experts.down_proj", "self_attn.q_proj.weight"], "q_proj, which cannot be adapted"),
    ],
)
def test_only_packed_experts_can_be_target_parameters(names, message, tmp_path):
    model = build_model("qwen3_moe", tmp_path / "model")
    lora = {"target_modules": ["o_proj"], "target_parameters": names}
    with pytest.raises(ConfigError, match=message):
        train_and_save(model, tmp_path / "saved", 1, lora=lora)


def sample(model, prompts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue each prompt by `length` tokens; return them and their log-probs."""
    ids, found = prompts, []
    with torch.no_grad():
        for _ in range(length):
            logprobs = model(ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1)
            ids, found = torch.cat([ids, token], 1), [*found, logprobs.gather(1, token)]
    return ids[:, prompts.shape[1] :], torch.cat(found, 1)


@pytest.mark.slow
def test_gspo_teaches_a_mixture_a_task(tmp_path):
    """The reward is the share of tokens below 64, of 288. It rises from 0.2 to 0.9 in 40 steps."""
    from raylight.learner.updates.policy import Policy

    path = build_model("qwen3_moe", tmp_path)
    torch.manual_seed(0)
    gspo = GSPO(
        model=path,
        lr=3e-3,
        mini_batches=2,
        clip_ratio_low=0.03,
        clip_ratio_high=0.04,
        max_logprob_mismatch=1e-3,
    )
    policy = Policy(path, LearnerConfig(), gspo.policy_settings(), 40)
    sampler = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = torch.tensor([[90, 84], [20, 31]]).repeat_interleave(8, 0)
    means = []
    for step in range(40):
        tokens, logprobs = sample(sampler, prompts, 12)
        rewards = (tokens < 64).float().mean(1)
        rows = [
            Trajectory(
                str(i), [*prompt, *row], [0, 0] + [1] * 12, [0.0, 0.0, *sampled], [-1, -1] + [step] * 12
            )
            for i, (prompt, row, sampled) in enumerate(
                zip(prompts.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
            )
        ]
        policy.update(TrainBatch(rewards.tolist(), [str(i // 8) for i in range(16)], rows, list(range(16))))
        source = WeightSource(policy.engine.module, torch.float32, names="module")
        sampler.load_state_dict(dict(source))
        means.append(float(rewards.mean()))
    assert means[0] < 0.35
    assert sum(means[-5:]) / 5 > 0.9, means


@pytest.mark.slow
def test_ranks_do_not_change_the_update_of_a_mixture(tmp_path):
    for model_type in MOE:
        build_model(model_type, tmp_path / "models" / model_type)
    alone = {
        model_type: train_and_save(str(tmp_path / "models" / model_type), tmp_path / "alone", 1)["probe"]
        for model_type in MOE
    }
    shared = run_ranks(moe_ranks.main, 2, tmp_path)[0]
    for model_type, probe in shared.items():
        assert probe == pytest.approx(alone[model_type], abs=1e-4), model_type
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / model_type, dtype=torch.float32)
        assert plain_probe(saved) == pytest.approx(probe, abs=1e-4), model_type
        assert read_shapes(str(tmp_path / "saved" / model_type)) == read_shapes(
            str(tmp_path / "models" / model_type)
        )
    assert shared.keys() == MOE.keys()


@pytest.mark.slow
def test_ranks_do_not_change_the_adapter_of_packed_experts(tmp_path):
    model = build_model("qwen3_moe", tmp_path / "models" / "qwen3_moe")
    lora = {"rank": 3, "target_parameters": PACKED}
    alone = train_and_save(model, tmp_path / "alone", 1, lora=lora)["probe"]
    shared = run_ranks(moe_ranks.main, 2, tmp_path, lora)[0]["qwen3_moe"]
    assert shared == pytest.approx(alone, abs=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "qwen3_moe", dtype=torch.float32)
    assert plain_probe(saved) == pytest.approx(alone, abs=1e-5)
