"""The head that computes log-probs, on models whose output layers differ."""

import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raylight.errors import ConfigError
from raylight.learner.tokens import token_logprobs as chunks
from raylight.learner.tokens.micro_batch import MicroBatch, place
from raylight.learner.tokens.response_logprobs import LogprobHead
from raylight.learner.tokens.rows import TrainRow

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
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # calls a part of its transformer
    "mamba": {"state_size": 4},  # reads the type of the output layer's weights
    "falcon_h1": {  # reads a scale of its transformer
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 0.5,
    },
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48},  # its prefix is not a submodule
}
"""Model types, with what their configurations need in addition to `SIZES`."""


@pytest.fixture
def rows():
    """Rows of several lengths and temperatures, with observations between the sampled tokens."""
    prompts, masks = [[5, 6, 7], [8], [9, 10]], [[1, 1, 0, 0, 1], [1], [0, 1, 1]]
    found = []
    for i, (prompt, mask, temperature) in enumerate(zip(prompts, masks, [0.7, 1.0, 1.3], strict=True)):
        response, zeros = torch.arange(len(mask)) + 11, torch.zeros(len(mask))
        tokens = torch.tensor(prompt), response, torch.tensor(mask)
        found.append(TrainRow(i, i, *tokens, zeros, zeros.long(), temperature))
    return found


def micro_batch(rows, **options):
    return MicroBatch(rows, torch.device("cpu"), rollouts=3, tokens=6, dp_size=1, **options)


def make_model(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval()


def plain(model, rows):
    """Log-probs, entropies and sums of squared probabilities of the sampled tokens, from full logits."""
    logprobs, entropies, squares = [], [], []
    for row in rows:
        ids, sampled = torch.cat([row.prompt, row.response]), torch.cat([row.prompt * 0, row.mask])[1:] == 1
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / row.temperature
        found = logits.log_softmax(-1)
        logprobs.append(found.gather(-1, ids[1:, None])[:, 0][sampled])
        entropies.append(-(found.exp() * found).sum(-1)[sampled])
        squares.append(found.exp().square().sum(-1)[sampled])
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(squares)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("limit", [VOCABULARY * 2, 2**25], ids=["chunks", "one-chunk"])
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(kind, limit, rows, monkeypatch):
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", limit)
    model = make_model(kind)
    expected = plain(model, rows)
    leaves = [param for param in model.parameters() if param.requires_grad]
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].mean(), leaves, allow_unused=True)
    LogprobHead(model)
    batch = micro_batch(rows, packed=False, entropy=True, entropy_grad=True, squares=True)
    output = model(
        **batch.padded_inputs(),
        labels=None,  # an argument that peft passes
        use_cache=False,
        sampled=batch.targets(),
    )
    torch.testing.assert_close((output["log_probs"], output["entropy"]), expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output["sum_pi_squared"], expected[2].detach(), rtol=1e-5, atol=1e-6)
    loss = output["log_probs"].sum() + output["entropy"].mean()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert set(model.state_dict()) == set(make_model(kind).state_dict())


def test_values_return_to_the_places_of_their_tokens(rows):
    batch = micro_batch(rows, packed=True)
    targets = batch.targets()
    assert targets.targets.tolist() == [11, 12, 15, 11, 12, 13]
    assert targets.temperatures.tolist() == pytest.approx([0.7] * 3 + [1.0] + [1.3] * 2)
    before = [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0]
    assert targets.positions.int().tolist() == [before]
    padded = micro_batch(rows, packed=False).targets().positions
    assert padded.int().tolist() == [before[:8], before[8:10] + [0] * 6, before[10:] + [0] * 3]
    placed = place(targets.targets, batch.mask)
    assert placed.tolist() == [[11, 12, 0, 0, 15], [11, 0, 0, 0, 0], [0, 12, 13, 0, 0]]


def test_ranks_that_share_a_sequence_compute_each_token_once(rows, monkeypatch):
    from raylight.learner import verl_api as verl
    from raylight.learner.model.fsdp import RaylightEngine

    everything = micro_batch(rows, packed=True).targets()
    found, targets = [], []
    for rank in range(2):

        def pad_and_slice(ids, _positions, ranks, rank=rank):
            padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % ranks))
            return padded.chunk(ranks, 1)[rank], None, padded.shape[1] - ids.shape[1]

        monkeypatch.setattr(verl, "ulysses_pad_and_slice_inputs", pad_and_slice)
        engine = object.__new__(RaylightEngine)
        engine.ulysses_sequence_parallel_size = 2
        own = engine._slice_for_rank(everything)
        found.append(place(own.targets, own.positions[0]))
        targets += own.targets.tolist()
        assert len(own.temperatures) == len(own.targets)
    assert targets == everything.targets.tolist()
    flat = place(everything.targets, everything.positions[0])
    assert torch.cat(found)[: len(flat)].tolist() == flat.tolist()


def test_a_model_without_an_output_layer_of_its_own_raises():
    model = make_model("llama")
    model.get_output_embeddings = types.MethodType(lambda self: self.model.embed_tokens, model)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be trained"):
        LogprobHead(model)
