"""The table of architectures: each passes or fails the check of names as docs/models.md says."""

import copy
import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from docs_snippets import DOCS
from process_groups import only_rank

from raylight.learner.model.model_check import trained_class
from raylight.learner.model.varlen_attention import VARLEN, row_bounds


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_models", DOCS / "generate_models.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
ROWS = GENERATOR.read_rows()


COMMON = {
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "glm4",
    "deepseek_v3",
    "gpt2",
    "llama4",
}
TRAINED_EACH_TIME = {"opt", "mamba", "llama4_text", "glm_moe_dsa"}
"""Model types whose forward pass or attention has a way around it in the learner."""
PACKED_EACH_TIME = {"llama", "qwen3", "gemma3_text", "deepseek_v3", "mixtral"}
"""Model types with attention of a kind each: plain, with norms, with windows, latent, and with experts."""


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in GENERATOR.TRAINED | COMMON else pytest.param(name, marks=pytest.mark.slow)
        for name in ROWS
    ],
)
def test_the_names_of_an_architecture_are_checked(model_type: str) -> None:
    name, _, names, _, trained, _, _, packed = ROWS[model_type]
    if "timm" in names and importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed here")
    config = GENERATOR.tiny_config(model_type, name)
    assert GENERATOR.check_names(config) == names
    assert (trained == "yes") == (model_type in GENERATOR.TRAINED)
    assert GENERATOR.packed_rows(config, names) == packed


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in TRAINED_EACH_TIME else pytest.param(name, marks=pytest.mark.slow)
        for name, row in ROWS.items()
        if row[3]
    ],
)
@only_rank()
def test_an_architecture_trains_as_the_table_says(model_type: str) -> None:
    name, _, _, trains, *_ = ROWS[model_type]
    assert GENERATOR.train_step(GENERATOR.tiny_config(model_type, name)) == trains == "yes"


def gradients(model: Any, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a weighted sum of a model's outputs."""
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
    (outputs * weights).sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in PACKED_EACH_TIME else pytest.param(name, marks=pytest.mark.slow)
        for name, row in ROWS.items()
        if row[7] == "yes"
    ],
)
def test_packed_rows_are_computed_as_each_alone(model_type: str) -> None:
    """Rows are longer than the window of a layer."""
    config = GENERATOR.tiny_config(model_type, ROWS[model_type][0])
    text, architecture = config.get_text_config(), trained_class(config)
    if getattr(text, "sliding_window", None):
        text.sliding_window = 5
    text.initializer_range = 0.1
    models = []
    for attention in ("eager", VARLEN):
        torch.manual_seed(0)
        own = copy.deepcopy(config)
        models.append(architecture._from_config(own, dtype=torch.float32, attn_implementation=attention))
    plain, packing = (model.eval() for model in models)
    rows = [torch.randint(3, 320, (length,)) for length in (13, 9, 17)]
    alone = torch.cat([plain(row[None], use_cache=False).logits[0] for row in rows])
    packed = packing(
        input_ids=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
        use_cache=False,
        **row_bounds([len(row) for row in rows], torch.device("cpu")),
    ).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))
    expected, found = gradients(plain, alone), gradients(packing, packed)
    assert found.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).norm())
        assert difference <= 3e-5 * float(gradient.norm()) + 1e-6 * largest, name


def test_the_table_has_most_architectures() -> None:
    passed = [row for row in ROWS.values() if row[2] == row[3] == "yes"]
    assert len(passed) >= 80
    assert all(row[3] for row in ROWS.values() if row[2] == "yes")
    assert ROWS.keys() >= GENERATOR.TRAINED | COMMON
