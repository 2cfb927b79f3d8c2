"""Forms of published models: trained, saved and served as they are."""

from __future__ import annotations

import pytest
import torch
from ranks import make_batch, plain_logprobs
from safetensors.torch import load_file
from tiny_models import build_model, build_qwen3_5
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from raylight.config import LearnerConfig
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.model.weights import save_model
from raylight.learner.updates.policy import Policy
from raylight.weights.source import WeightSource

pytestmark = pytest.mark.usefixtures("one_rank")
LORA = {"lora": {"rank": 4}}


def train(path: str, config: dict[str, object]) -> Policy:
    """Return a policy after one step."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        batch = make_batch([found.tolist() for found in plain_logprobs(plain)])
    settings = PolicySettings(lr=1e-2, max_logprob_mismatch=1e-3)
    policy = Policy(path, LearnerConfig(**config), settings, total_steps=1)
    assert policy.update(batch)["learner/grad_norm"] > 0
    return policy


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3", {"vocab_size": 384}),
        ("qwen3", {"tie_word_embeddings": True}),
        pytest.param("llama", {"tie_word_embeddings": False}, marks=pytest.mark.slow),
        ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 8}),
    ],
    ids=["padded", "tied", "untied", "gemma"],
)
async def test_a_model_with_two_ends_and_without_a_start_keeps_its_form(model_type, settings, tmp_path):
    path = build_model(model_type, tmp_path / "model", **settings)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.bos_token = None
    tokenizer.save_pretrained(path)
    given = GenerationConfig(eos_token_id=[256, 20], temperature=0.6, top_p=0.95, top_k=20, do_sample=True)
    given.save_pretrained(path)
    policy = train(path, {})
    save_model(policy.engine, str(tmp_path / "saved"))

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: each.shape for name, each in saved.items()} == {
        name: each.shape for name, each in load_file(f"{path}/model.safetensors").items()
    }
    kept = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (kept.eos_token_id, kept.temperature, kept.top_p, kept.top_k) == ([256, 20], 0.6, 0.95, 20)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").bos_token is None
    config = AutoConfig.from_pretrained(tmp_path / "saved")
    assert settings.items() <= config.to_dict().items()

    engine = TransformersEngine(str(tmp_path / "saved"), "policy", slots=2, max_model_len=64)
    ids = list(range(1, 30))
    assert await engine.logprobs(ids) == pytest.approx(policy.logprobs(ids), abs=1e-4)
    for end in (256, 20):  # both end an answer; the model's own temperature does not apply
        found = await engine.generate([1, 2], SamplingParams(8, logit_bias=((end, 100.0),)))
        assert (found.output_ids, found.finish_reason) == ([end], "stop")
    engine.close()


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("qwen3_5_moe", {}),
        *(
            pytest.param(*given, marks=pytest.mark.slow("experts without an adapter show it"))
            for given in [("qwen3_5", LORA), ("qwen3_5", {}), ("qwen3_5_moe", LORA)]
        ),
    ],
)
async def test_the_text_part_is_trained_and_saved_in_the_published_form(model_type, lora, tmp_path):
    path = build_qwen3_5(tmp_path / "model", model_type)
    before = load_file(f"{path}/model.safetensors")
    policy = train(path, lora)

    sent = dict(WeightSource(policy.engine.module, torch.float32, tied=False))
    assert sent.keys() <= before.keys()
    assert all(name == "lm_head.weight" or name.startswith("model.language_model.") for name in sent)

    save_model(policy.engine, str(tmp_path / "saved"))
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert changed <= sent.keys()
    assert AutoConfig.from_pretrained(tmp_path / "saved").architectures == [
        type(AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")).__name__
    ]

    engine = TransformersEngine(str(tmp_path / "saved"), "policy", slots=2, max_model_len=64)
    ids = list(range(1, 30))
    assert await engine.logprobs(ids) == pytest.approx(policy.logprobs(ids), abs=1e-4)
    engine.close()
