"""The quickstart: a small model learns to add, through every real part of raylight, in about a minute on a CPU."""

from __future__ import annotations

from pathlib import Path

STARTER_MODEL = str(Path(__file__).parent / "model")
"""Folder of a model of 0.25M parameters that adds two-digit numbers right about half of the time."""
