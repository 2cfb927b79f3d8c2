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
from raylight.engines.vllm.adapter_files import TEXT_PART, AdapterFiles

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
