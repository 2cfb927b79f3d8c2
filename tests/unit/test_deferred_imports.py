"""Deferred imports: what the block imports works later, and nothing stays in `sys.modules`."""

import importlib
import json
import sys

import pytest

from raylight.deferred_imports import defer_imports


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
