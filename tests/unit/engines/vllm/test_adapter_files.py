"""Files of adapters: complete, removed at the end, and removed for processes that were killed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from raylight.engines.protocol import LoraAdapter
from raylight.engines.vllm.adapter_files import TEXT_PART, AdapterFiles, _with_common_scale
from raylight.errors import WeightSyncError
from raylight.weights.peft_files import read_adapter

ADAPTER = LoraAdapter({"r": 4}, {"a.lora_A.weight": np.ones((4, 2), dtype=np.float32)})
KILLED = """
import os, signal
from raylight.engines.protocol import LoraAdapter
from raylight.engines.vllm.adapter_files import AdapterFiles

print(AdapterFiles().write(LoraAdapter({}, {})), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_adapter_has_a_folder_in_pefts_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from safetensors.numpy import load_file

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = AdapterFiles()
    folders = {files.write(ADAPTER) for _ in range(2)}
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 4}
        assert load_file(folder / "adapter_model.safetensors")["a.lora_A.weight"].shape == (4, 2)
    other = AdapterFiles()  # leaves the folders of live processes
    assert all(folder.exists() for folder in folders)
    files.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_the_layers_of_a_text_part_have_the_names_of_the_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from safetensors.numpy import load_file

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ["base_model.model.model.layers.0.q_proj.lora_A.weight", "base_model.model.lm_head.lora_A.weight"]
    files = AdapterFiles()
    folder = files.write(LoraAdapter({}, {name: np.ones(1) for name in names}), TEXT_PART)
    assert sorted(load_file(folder / "adapter_model.safetensors")) == [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.language_model.layers.0.q_proj.lora_A.weight",
    ]
    files.close()


@pytest.mark.parametrize("rslora", [False, True])
def test_layers_with_other_ranks_and_alphas_have_the_scale_of_all(
    rslora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    (tmp_path / "files").mkdir()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "embed_tokens"],
        rank_pattern={"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 6},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 3, "v_proj": 16, "embed_tokens": 32},
        use_rslora=rslora,
        init_lora_weights=False,
    )
    model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2)), config)
    model.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path)
    files = AdapterFiles()
    for _ in range(2):  # the adapter itself is left as it is
        weights = load_file(files.write(adapter) / "adapter_model.safetensors")
    files.close()
    scale = adapter.config["lora_alpha"] / adapter.config["r"] ** (0.5 if rslora else 1)  # vLLM's
    for name, layer in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            a, b = (weights[f"{name}.lora_{part}.weight"] for part in "AB")
            torch.testing.assert_close(scale * b @ a, layer.get_delta_weight("default").detach())
    layer = model.base_model.model.model.embed_tokens
    a, b = (weights[f"base_model.model.model.embed_tokens.lora_embedding_{part}"] for part in "AB")
    torch.testing.assert_close(scale * (b @ a).T, layer.get_delta_weight("default").detach())


def expert_adapter(folder: Path, parameters: list[str], **patterns: dict[str, int]):
    """Return an adapter of packed experts whose B is 1, and peft's scale of each layer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=parameters, **patterns
    )
    model = get_peft_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)), config)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    with torch.no_grad():
        for layer in layers.values():
            layer.lora_B["default"].weight.fill_(1.0)
    model.save_pretrained(folder)
    return read_adapter(folder), {name: layer.scaling["default"] for name, layer in layers.items()}


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # peft looks for patterns in modules only
@pytest.mark.parametrize(
    ("parameters", "patterns"),
    [
        (BOTH, {"alpha_pattern": {"q_proj": 16}}),
        (BOTH, {"rank_pattern": {r"experts\..*": 2}, "alpha_pattern": {"q_proj": 16}}),
        (BOTH[1:], {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"experts.down_proj": 32}}),
        (BOTH[1:], {"alpha_pattern": {"experts": 32, "q_proj": 2}}),  # "experts" names no parameter
    ],
)
def test_packed_experts_have_the_scale_of_all(
    parameters: list[str], patterns: dict[str, dict[str, int]], tmp_path: Path
):
    adapter, scales = expert_adapter(tmp_path, parameters, **patterns)
    weights = _with_common_scale(adapter)
    assert {name: 2 * weights[f"{name}.lora_B.weight"].unique().item() for name in scales} == scales


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
@pytest.mark.parametrize("parameters", [BOTH, ["gate_up_proj", "down_proj"]])
def test_parameters_of_one_layer_with_different_scales_are_refused(parameters: list[str], tmp_path: Path):
    adapter, _ = expert_adapter(tmp_path, parameters, alpha_pattern={"experts.down_proj": 32})
    with pytest.raises(WeightSyncError, match=r"mlp\.experts different scales"):
        _with_common_scale(adapter)


@pytest.mark.slow
def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert left.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = AdapterFiles()
    assert not left.parent.exists()
    files.close()
