"""The quickstart: a small model learns to add in about a minute on a CPU, with all components of a real
run."""

from __future__ import annotations

from pathlib import Path

STARTER_MODEL = str(Path(__file__).parent / "model")
"""Folder of a model of 0.25M parameters that adds two-digit numbers with an accuracy of about one half.

`examples/starter_models` makes such models.
"""
TOOL_MODEL = str(Path(__file__).parent / "tool_model")
"""Folder of a model of 0.5M parameters that calls tools in Hermes' format and answers with their results.

It copies: numbers and words of the question become arguments, whatever the tools are called, and the tool's
result becomes the answer. It computes nothing itself. Sampled at temperature 1, about half of its rollouts
are right. Built by `scripts/build_tool_model.py`.
"""
