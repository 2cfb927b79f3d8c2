"""Qwen 3.5's text part in vLLM: loaded from a whole checkpoint, updated, and adapted.

vLLM's CPU build computes its linear attention in bfloat16 only, with heads of 128.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_qwen3_5
from vllm_helpers import ask, difference

from raylight.engines.protocol import LoraAdapter

pytest.importorskip("torchvision", reason="vLLM imports Qwen 3.5's image processor")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parent / "weight_update.py"
ROUNDING = 0.1
"""Largest difference of a log-prob in bfloat16 to float32."""


@pytest.fixture(scope="module")
def text_and_vision(tmp_path_factory: pytest.TempPathFactory) -> str:
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
    return build_qwen3_5(tmp_path_factory.mktemp("qwen3_5"), **heads)


def test_an_updated_text_part_computes_what_transformers_computes(text_and_vision: str) -> None:
    command = [sys.executable, str(SCRIPT), text_and_vision, "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaded"] < ROUNDING
    assert found["old"] > 5 * ROUNDING
    assert found["updated"] < ROUNDING


@pytest.mark.asyncio(loop_scope="session")
async def test_an_adapter_of_the_text_part_is_served(text_and_vision: str, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from vllm_bench import open_bench

    text = Qwen3_5TextConfig.from_pretrained(text_and_vision)
    base = Qwen3_5ForCausalLM.from_pretrained(text_and_vision, config=text, dtype=torch.float32)
    async with open_bench(text_and_vision, slots=4, dtype="bfloat16") as bench:
        torch.manual_seed(0)
        adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
        adapted.save_pretrained(tmp_path)
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        adapter = LoraAdapter(settings, load_file(tmp_path / "adapter_model.safetensors"))
        await bench.engine.load_adapter("learner", 1, adapter)
        await ask(bench, 16, "learner")
        assert difference(adapted, bench.sample).max() < ROUNDING
        with adapted.disable_adapter():
            assert difference(adapted, bench.sample).max() > 5 * ROUNDING
