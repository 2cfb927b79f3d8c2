"""Check of a model before training: files that are not the model's, and architectures that do not fit."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MOE, build_model, build_qwen3_5
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM

from raylight.errors import ConfigError
from raylight.learner.model import model_check
from raylight.learner.model.model_check import check_model, read_shapes
from raylight.quickstart import STARTER_MODEL, TOOL_MODEL
from raylight.weights.source import ParamMeta, WeightSource

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(build_model("qwen3_moe", tmp_path))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or remove tensors in a model's file."""
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize("path", [STARTER_MODEL, TOOL_MODEL])
def test_the_quickstarts_models_pass(path: str) -> None:
    check_model(path)


@pytest.mark.parametrize("model_type", MOE)
def test_mixtures_of_experts_pass(model_type: str, tmp_path: Path) -> None:
    check_model(build_model(model_type, tmp_path))


def test_only_headers_are_read(tmp_path: Path) -> None:
    """Files of 57 GB without content on the disk are checked."""
    config = AutoConfig.for_model(
        "qwen3", hidden_size=5120, num_hidden_layers=64, architectures=["Qwen3ForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    files: dict[str, str] = {}
    for number, group in enumerate(_groups(WeightSource(module, torch.bfloat16))):
        header, end = {}, 0
        for param in group:
            start, end = end, end + 2 * math.prod(param.shape)
            header[param.name] = {"dtype": "BF16", "shape": param.shape, "data_offsets": [start, end]}
        content = json.dumps(header).encode()
        file = tmp_path / f"model-{number}.safetensors"
        with file.open("wb") as output:
            output.write(struct.pack("<Q", len(content)) + content)
            output.truncate(8 + len(content) + end)
        files |= dict.fromkeys(header, file.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 57e9
    check_model(str(tmp_path))


def _groups(source: WeightSource) -> list[list[ParamMeta]]:
    params = {param.name: param for param in source.metadata()}
    return [[params[name] for name in group] for group in source.groups()]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({EXPERT: None}, r"Qwen3MoeForCausalLM: .*model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        ({"model.norm.weight": None}, r"missing in the files: model\.norm\.weight;"),
        ({"value_head.weight": torch.zeros(1)}, r"unknown to the model: value_head\.weight;"),
        (
            {"model.norm.weight": torch.zeros(7)},
            r"of another shape: model\.norm\.weight \(7,\) instead of \(64,\)",
        ),
    ],
)
def test_tensors_that_differ_are_named(tensors: dict, message: str, model: Path) -> None:
    change(model, **tensors)
    with pytest.raises(ConfigError, match=message):
        check_model(str(model))


def test_an_architecture_whose_conversion_is_not_undone_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylight.weights.source.revert_weight_conversion", lambda model, tensors: tensors)
    with pytest.raises(
        ConfigError, match=r"Qwen3MoeForCausalLM .*other names.*experts\.gate_up_proj \(4, 64, 64\)"
    ):
        check_model(str(model))


def test_quantized_weights_are_refused(model: Path) -> None:
    configure(model, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match=r"quantized \(mxfp4\)"):
        check_model(str(model))


def test_another_class_than_that_of_the_engines_is_refused(model: Path) -> None:
    configure(model, architectures=["Qwen3MoeForSequenceClassification"])
    with pytest.raises(ConfigError, match="Qwen3MoeForSequenceClassification cannot be trained"):
        check_model(str(model))


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_is_checked_with_the_names_of_the_whole(model_type: str, tmp_path: Path) -> None:
    path = build_qwen3_5(tmp_path, model_type)
    check_model(path)
    change(tmp_path, **{"model.language_model.norm.weight": None})
    with pytest.raises(ConfigError, match=r"missing in the files: model\.norm\.weight"):
        check_model(path)


def test_an_architecture_whose_logits_need_more_than_hidden_states_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Qwen3MoeForCausalLM.forward

    def forward(self: Qwen3MoeForCausalLM, *args: object, **options: object) -> object:
        output = own(self, *args, **options)
        return output if output.past_key_values.get_seq_length() else None

    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", forward)
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM cannot be trained: .*hidden states alone"):
        check_model(str(model))


def test_tied_weights_may_be_in_the_files_or_not(tmp_path: Path) -> None:
    build_model("qwen3_moe", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in read_shapes(str(tmp_path))
    check_model(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    change(tmp_path, **{"lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    check_model(str(tmp_path))
    change(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": None})
    with pytest.raises(ConfigError, match="missing in the files"):
        check_model(str(tmp_path))


def test_files_of_any_kind_are_read(model: Path, tmp_path: Path) -> None:
    shapes = read_shapes(str(model))
    assert shapes[EXPERT] == (32, 64)
    sharded, pickled = tmp_path / "sharded", tmp_path / "pickled"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert read_shapes(str(sharded)) == shapes
    pickled.mkdir()
    torch.save(load_file(model / "model.safetensors"), pickled / "pytorch_model.bin")
    assert read_shapes(str(pickled)) == shapes


def test_damaged_files_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-1], b"\xff" * 100, b"", content[:8] + b"{" * 8):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot read the weights in .*model\.safetensors: "):
            check_model(str(model))
    file.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        check_model(str(model))


def test_long_lists_are_shortened() -> None:
    assert model_check._some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
