"""The quickstart: a small model learns to add in about a minute on a CPU, with all components of a real
run."""

from __future__ import annotations

from pathlib import Path

STARTER_MODEL = str(Path(__file__).parent / "model")
"""Folder of a model of 0.25M parameters that adds two-digit numbers with an accuracy of about one half.

Built by `scripts/build_quickstart_model.py`.
"""
