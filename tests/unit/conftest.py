"""A tiny random model, built once and never downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from podman_image import podman_image

__all__ = ["podman_image"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(folder: Path, *, tie: bool, seed: int = 0) -> str:
    """A Qwen3 of two layers with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny(tmp_path_factory.mktemp("untied"), tie=False)


@pytest.fixture
def make_engine(tied_model: str) -> Iterator[Callable[..., Any]]:
    """Start engines that are closed when the test ends."""
    from raylight.engines.transformers.engine import TransformersEngine

    started = []

    def start(path: str = tied_model, **settings: Any) -> TransformersEngine:
        defaults = {
            "dtype": "float32",
            "slots": 16,
            "max_waiting": 100,
            "max_model_len": 1024,
            "seed": 0,
            "device": "cpu",
        }
        engine = TransformersEngine(path, "policy", **defaults | settings)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def planned_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs that a Trainer planned. Instead of connecting to Ray, after all checks, it raises ReachedRay."""
    from unit_helpers import ReachedRay

    from raylight.trainer import launch
    from raylight.trainer.runs.custom_run import CustomRun
    from raylight.trainer.runs.eval_run import EvalRun
    from raylight.trainer.runs.policy_run import PolicyRun

    planned: list[Any] = []

    def noting(plan: Any) -> Any:
        def note(*args: Any) -> Any:
            planned.append(plan(*args))
            return planned[-1]

        return note

    for kind in (PolicyRun, CustomRun, EvalRun):
        monkeypatch.setattr(kind, "plan", noting(kind.plan))

    def refuse(*args: Any) -> None:
        raise ReachedRay

    monkeypatch.setattr(launch, "ray_session", refuse)
    return planned


@pytest.fixture
def hollow_model(tmp_path: Path) -> str:
    """A folder that looks like a model."""
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    return str(tmp_path)
