"""The text part of a model with a vision part: checked, trained, served and saved in its published form."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import make_batch, plain_logprobs
from safetensors.torch import load_file
from tiny_models import build_qwen3_5
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from raylight.config import LearnerConfig
from raylight.engines.transformers.engine import TransformersEngine
from raylight.experience.settings import PolicySettings
from raylight.learner.policy import Policy
from raylight.learner.weights import save_model
from raylight.weights.source import WeightSource


@pytest.fixture(autouse=True)
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/ranks", 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
async def test_the_text_part_is_trained_and_saved_in_the_published_form(model_type, lora, tmp_path):
    path = build_qwen3_5(tmp_path / "model", model_type)
    before = load_file(f"{path}/model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        batch = make_batch([found.tolist() for found in plain_logprobs(plain)])
    settings = PolicySettings(lr=1e-2, max_logprob_mismatch=1e-3)
    policy = Policy(path, LearnerConfig(**lora), settings, total_steps=1)
    assert policy.update(batch)["learner/grad_norm"] > 0

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
