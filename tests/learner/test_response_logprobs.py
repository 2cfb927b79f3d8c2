"""The head that computes log-probs, on models whose output layers differ."""

import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raylight.errors import ConfigError
from raylight.learner import token_logprobs as chunks
from raylight.learner.response_logprobs import (
    LogprobHead,
    flat_mask,
    sampled_tokens,
    select_response_tokens,
    to_nested,
)

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "llama": {},
    "qwen3_moe": EXPERTS | {"output_router_logits": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"final_logit_softcapping": 3.0},  # a soft cap
    "cohere": {"logit_scale": 0.25},  # a scale
    "granite": {"logits_scaling": 4.0},  # a divisor
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},  # an older layout
}
"""Model types, with what their configurations need beside `SIZES`."""


def nested(rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def data():
    """Rows of several lengths and temperatures, with observations between the sampled tokens."""
    prompts, masks = [[5, 6, 7], [8], [9, 10]], [[1, 1, 0, 0, 1], [1], [0, 1, 1]]
    responses = [[11 + i for i in range(len(mask))] for mask in masks]
    rows = list(zip(prompts, responses, masks, strict=True))
    return {
        "input_ids": nested([p + r for p, r, _ in rows]),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "loss_mask": nested([[0] * len(p) + m for p, _, m in rows]),
        "temperature": torch.tensor([0.7, 1.0, 1.3]),
    }


def make_model(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval()


def plain(model, data):
    """Log-probs and entropies of the sampled tokens, row by row from full logits."""
    logprobs, entropies = [], []
    for ids, mask, temperature in zip(
        data["input_ids"].unbind(), data["loss_mask"].unbind(), data["temperature"], strict=True
    ):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
        found = logits.log_softmax(-1)
        sampled = mask[1:] == 1
        logprobs.append(found.gather(-1, ids[1:, None])[:, 0][sampled])
        entropies.append(-(found.exp() * found).sum(-1)[sampled])
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("limit", [VOCABULARY * 2, 2**25], ids=["chunks", "one-chunk"])
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(kind, limit, data, monkeypatch):
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", limit)
    model = make_model(kind)
    expected = plain(model, data)
    leaves = [param for param in model.parameters() if param.requires_grad]
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].mean(), leaves, allow_unused=True)
    LogprobHead(model)
    padded = torch.nested.to_padded_tensor(data["input_ids"], 0)
    lengths = data["input_ids"].offsets().diff()
    output = model(
        input_ids=padded,
        attention_mask=(torch.arange(padded.shape[1])[None] < lengths[:, None]).long(),
        labels=None,  # an argument that peft passes
        use_cache=False,
        sampled=sampled_tokens(data, packed=False, entropy=True, entropy_grad=True),
    )
    torch.testing.assert_close((output["log_probs"], output["entropy"]), expected, rtol=1e-5, atol=1e-5)
    loss = output["log_probs"].sum() + output["entropy"].mean()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert set(model.state_dict()) == set(make_model(kind).state_dict())


def test_values_return_to_the_places_of_their_tokens(data):
    sampled = sampled_tokens(data, packed=True, entropy=False, entropy_grad=False)
    assert sampled.targets.tolist() == [11, 12, 15, 11, 12, 13]
    assert sampled.positions.shape == (1, len(data["input_ids"].values()))
    assert torch.equal(sampled.positions[0], flat_mask(data))
    placed = to_nested(sampled.targets.float(), data)
    assert select_response_tokens(placed, data).tolist() == [11, 12, 0, 0, 15, 11, 0, 12, 13]


def test_ranks_that_share_a_sequence_compute_each_token_once(data, monkeypatch):
    from raylight.learner import verl_api as verl
    from raylight.learner.fsdp import RaylightEngine

    everything = sampled_tokens(data, packed=True, entropy=False, entropy_grad=False)
    found, targets = [], []
    for rank in range(2):

        def pad_and_slice(ids, _positions, ranks, rank=rank):
            padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % ranks))
            return padded.chunk(ranks, 1)[rank], None, padded.shape[1] - ids.shape[1]

        monkeypatch.setattr(verl, "ulysses_pad_and_slice_inputs", pad_and_slice)
        engine = object.__new__(RaylightEngine)
        engine.ulysses_sequence_parallel_size = 2
        own = engine._slice_for_rank(everything)
        spread = torch.zeros(own.positions.shape[1]).masked_scatter(own.positions[0], own.targets.float())
        found.append(spread)
        targets += own.targets.tolist()
        assert len(own.temperatures) == len(own.targets)
    assert targets == everything.targets.tolist()
    flat = to_nested(everything.targets.float(), data).values()
    assert torch.cat(found)[: len(flat)].tolist() == flat.tolist()


def test_a_model_without_an_output_layer_of_its_own_raises():
    model = make_model("llama")
    model.get_output_embeddings = types.MethodType(lambda self: self.model.embed_tokens, model)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be trained"):
        LogprobHead(model)
