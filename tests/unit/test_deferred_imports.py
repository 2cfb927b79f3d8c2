"""Deferred imports: what the block imports works later, and nothing stays in `sys.modules`."""

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

from raylight.deferred_imports import defer_imports
from raylight.quickstart import STARTER_MODEL

WITHOUT_COMPILER = """
import sys
from raylight.engines.transformers.decoder import Decoder
from raylight.quickstart import STARTER_MODEL
Decoder(STARTER_MODEL, "float32", "cpu", 2, 64)
assert "torch._dynamo" not in sys.modules and "scipy.optimize" not in sys.modules
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex():
    pass
import torch
assert torch._dynamo.config is not None
"""


def test_a_deferred_function_loads_its_module_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with defer_imports("colorsys"):
        from colorsys import rgb_to_hsv
    assert "colorsys" not in sys.modules
    assert rgb_to_hsv(0.0, 0.0, 1.0)[2] == 1.0
    assert "colorsys" in sys.modules


def test_modules_are_real_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ImportError), defer_imports("colorsys", "json"):
        importlib.import_module("raylight.missing")
    import colorsys

    assert colorsys.__file__
    assert sys.modules["json"] is json, "an imported module stays"


def test_an_engine_loads_its_model_without_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True)


def test_a_model_that_needs_the_compiler_is_loaded_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylight.engines.transformers import decoder

    load, calls = decoder.AutoModelForCausalLM.from_pretrained, []

    def needs_compiler(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise ImportError("torch._dynamo is not a package")
        return load(*args, **options)

    monkeypatch.setattr(decoder.AutoModelForCausalLM, "from_pretrained", needs_compiler)
    made = decoder.Decoder(STARTER_MODEL, "float32", "cpu", 2, 64)
    assert len(calls) == 2
    assert made.module.config.num_hidden_layers > 0
