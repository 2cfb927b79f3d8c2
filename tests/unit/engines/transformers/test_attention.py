"""Architectures with sliding windows, eager attention, experts and layers that keep a state on the engine;
others are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import build_model
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers_helpers import MakeEngine, generate_all, logprobs_of

from raylight.engines.transformers.decoder import use_grouped_attention
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.slot_cache import SlotLayer
from raylight.errors import EngineStartError

WINDOW = {"sliding_window": 8}
SERVED: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "qwen3_moe": {},
    "mixtral": WINDOW,
    "gemma3_text": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""Changes of the tiny models."""


@pytest.mark.parametrize("model_type", SERVED)
async def test_logprobs_equal_plain_transformers(
    model_type: str, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """Equal prompts are computed once, and other sequences have left their slots before."""
    path = build_model(model_type, tmp_path, **SERVED[model_type])
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sizes = [(3, 2), (30, 12), (11, 4), (30, 9), (30, 12)]
    requests = [(list(range(1, length)), SamplingParams(tokens)) for length, tokens in sizes]
    for (prompt, _), sampled in zip(requests, await generate_all(make_engine(path), requests), strict=True):
        assert sampled.logprobs == pytest.approx(logprobs_of(plain, prompt, sampled.output_ids), abs=1e-4)


@pytest.mark.parametrize("queries", [1, 6])
def test_grouped_attention_is_that_of_transformers_to_the_last_bit(queries: int, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(build_model("mixtral", tmp_path), dtype=torch.float32)
    use_grouped_attention(module)
    grouped = AttentionInterface()[module.config._attn_implementation]
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 14, queries, 16), *torch.randn(2, 3, 2, 40, 16)
    cached = keys[:, :, :24], values[:, :, :24]
    mask = torch.arange(24) < torch.randint(1, 24, (3, 1, queries, 1))
    layer = SimpleNamespace(num_key_value_groups=7)
    with torch.inference_mode():
        found, expected = (
            attend(layer, query, *cached, mask, scaling=0.25) for attend in (grouped, sdpa_attention_forward)
        )
    assert torch.equal(found[0], expected[0])


def test_recurrent_layers_are_refused(tmp_path: Path, make_engine: MakeEngine) -> None:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 16, "n_groups": 1}
    with pytest.raises(EngineStartError, match="Mamba2ForCausalLM, which has layers of kind mamba"):
        make_engine(build_model("mamba2", tmp_path, **sizes))


@pytest.mark.parametrize(
    ("factor", "message"), [(2, "log-probs differ by"), (None, "it fails with TypeError")]
)
def test_an_architecture_that_uses_the_cache_in_another_way_is_refused(
    factor: Any, message: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = SlotLayer.update

    def changed(self: Any, keys: Any, values: Any, *arguments: Any, **options: Any) -> Any:
        keys, values = update(self, keys, values, *arguments, **options)
        return keys * factor, values

    monkeypatch.setattr(SlotLayer, "update", changed)
    with pytest.raises(EngineStartError, match=f"with its cache, {message}"):
        make_engine()
