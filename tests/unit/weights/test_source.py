"""Weight sources: names and shapes of the model's files, one layer group at a time."""

import weakref

import pytest
import torch
from tiny_models import MOE as MIXTURES
from tiny_models import build_model
from transformers import AutoConfig, AutoModelForCausalLM

from raylight.weights.source import WeightSource, layerwise_groups

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DENSE = SMALL | {"model_type": "qwen3", "head_dim": 8}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def build(settings: dict, device: str = "cpu") -> torch.nn.Module:
    settings = dict(settings)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (
            ["emb", "l.1.a", "l.0.a", "l.0.b.7.w", "norm"],
            [["emb"], ["l.0.a", "l.0.b.7.w"], ["l.1.a"], ["norm"]],
        ),
        (["l.0.a", "emb", "l.10.a", "l.9.a"], [["l.0.a"], ["l.9.a"], ["l.10.a"], ["emb"]]),
        (["b.0.x", "a.0.x", "b.1.x"], [["b.0.x"], ["b.1.x"], ["a.0.x"]]),
        (["a", "b"], [["a", "b"]]),
        (["0.weight", "layers2.3.w"], [["0.weight"], ["layers2.3.w"]]),
    ],
)
def test_names_are_divided_by_layer_as_vllm_divides_them(names, groups):
    assert layerwise_groups(names) == groups


@pytest.mark.parametrize("names", ["checkpoint", "module"])
@pytest.mark.parametrize("settings", [DENSE, MOE, DENSE | {"tie_word_embeddings": True}])
def test_metadata_is_what_iteration_yields_and_is_the_same_on_the_meta_device(settings, names):
    source = WeightSource(build(settings), torch.bfloat16, names=names)
    metadata = source.metadata()
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source] == [
        (param.name, param.dtype, param.shape) for param in metadata
    ]
    assert {param.dtype for param in metadata} == {torch.bfloat16}
    assert WeightSource(build(settings, "meta"), torch.bfloat16, names=names).metadata() == metadata
    assert source.groups() == layerwise_groups([param.name for param in metadata])
    assert "lm_head.weight" in source.groups()[-1]


def test_experts_have_the_names_and_values_of_the_files(tmp_path):
    from safetensors.torch import load_file

    model = build(MOE)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for module in (model, loaded):
        exported = dict(WeightSource(module, torch.float32))
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in stored
    names = {name for name, _ in WeightSource(model, torch.float32, names="module")}
    assert names == model.state_dict().keys()


def test_a_tied_tensor_is_yielded_under_each_name_or_once():
    model = build(DENSE | {"tie_word_embeddings": True})
    every, once = (dict(WeightSource(model, torch.float32, tied=tied)) for tied in (True, False))
    assert torch.equal(every["lm_head.weight"], every["model.embed_tokens.weight"])
    assert every.keys() - once.keys() == {"lm_head.weight"}


def test_an_adapter_is_merged_in_float32_before_the_conversion():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = build(MOE)
    before = {name: tensor.clone() for name, tensor in WeightSource(model, torch.float32)}
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "o_proj"]))
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    merged = dict(WeightSource(adapted, torch.bfloat16))
    assert merged.keys() == before.keys()
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.q_proj"
        lora = adapted.get_submodule(f"base_model.model.{name}")
        delta = lora.get_delta_weight("default")
        assert delta.abs().max() > 0.1
        assert torch.equal(merged[f"{name}.weight"], (before[f"{name}.weight"] + delta).bfloat16())
    for name, tensor in before.items():
        if "q_proj" not in name and "o_proj" not in name:
            assert torch.equal(merged[name], tensor.bfloat16())


def test_buffers_and_parameters_that_need_float32_are_not_converted():
    settings = SMALL | {
        "model_type": "dots1",
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    metadata = WeightSource(build(settings, "meta"), torch.bfloat16).metadata()
    float32 = [param.name for param in metadata if param.dtype == torch.float32]
    assert float32 == ["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_a_group_is_freed_before_the_next_one_is_gathered():
    source = WeightSource(build(MOE), torch.bfloat16)
    previous: list[weakref.ref] = []
    for _, tensors in source.iter_groups():
        assert all(ref() is None for ref in previous)
        previous = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        assert all(ref() is not None for ref in previous)
        tensors.clear()
    assert previous


@pytest.mark.parametrize("model_type", [name for name in MIXTURES if name != "qwen3_next"])
def test_the_transformers_engine_computes_with_the_weights_of_a_source(model_type, tmp_path):
    from raylight.engines.transformers.decoder import Decoder

    decoder = Decoder(build_model(model_type, tmp_path), "float32", "cpu", slots=1, longest=64)
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = list(range(1, 40))
    with torch.inference_mode():
        before = decoder.logprobs(ids, None)
        for param in changed.parameters():
            param.mul_(1.1)
        source = WeightSource(changed, torch.float32, names="module")
        decoder.check_weights({param.name: param.shape for param in source.metadata()})
        decoder.load(source)
        after = decoder.logprobs(ids, None)
        expected = changed(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    tokens = torch.tensor(ids[1:])[:, None]
    assert after == pytest.approx(expected.gather(-1, tokens)[:, 0].tolist(), abs=1e-4)
    assert max(abs(old - new) for old, new in zip(before, after, strict=True)) > 0.01


@pytest.mark.parametrize("settings", [DENSE, MOE, DENSE | {"tie_word_embeddings": True}])
def test_a_snapshot_yields_the_weights_at_its_time(settings):
    model = build(settings)
    source = WeightSource(model, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in source}
    buffers = []
    for _ in range(2):
        source.take_snapshot()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        after = dict(source)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert source.metadata() == WeightSource(model, torch.bfloat16).metadata()
        buffers.append({tensor.data_ptr() for tensor in source._snapshot[0].values()})
        before = {name: tensor.clone() for name, tensor in WeightSource(model, torch.bfloat16)}
    assert buffers[0] == buffers[1], "memory is reused"


def test_a_snapshot_of_an_adapted_model_copies_the_adapter_only():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(DENSE), LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    source = WeightSource(model, torch.float32)
    before = {name: tensor.clone() for name, tensor in source}
    source.take_snapshot()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.add_(1.0)
    after, changed = dict(source), dict(WeightSource(model, torch.float32))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert any(not torch.equal(changed[name], before[name]) for name in before)
    held = {tensor.data_ptr() for tensors in source._snapshot for tensor in tensors.values()}
    shared = {name for name, param in model.named_parameters() if param.data_ptr() in held}
    assert shared == {name for name, param in model.named_parameters() if not param.requires_grad}
