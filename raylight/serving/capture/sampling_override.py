"""Sampling of training rollouts from the policy's own distribution, whatever their agents request."""

from __future__ import annotations

from typing import Any

from raylight.experience.off_policy import NEUTRAL, off_policy_parameters

REMOVED = (*NEUTRAL, "seed")
"""Parameters that are removed. A seed would give all rollouts of a group the same random numbers."""


def override(fields: dict[str, Any], temperature: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request's fields with the training sampling, and the requested values that were replaced.

    The temperature is replaced, and `top_p`, `top_k`, `min_p`, penalties, biases that ban nothing and the
    seed are removed. Limits of length, stop words, schemas and tools stay as requested.
    """
    replaced = {name: fields[name] for name in REMOVED if fields.get(name) is not None}
    replaced = {name: value for name, value in replaced.items() if value not in NEUTRAL.get(name, ())}
    if fields.get("temperature", 1.0) not in (None, temperature):
        replaced["temperature"] = fields.get("temperature", 1.0)
    kept = {name: value for name, value in fields.items() if name not in REMOVED}
    if "logit_bias" in off_policy_parameters({"logit_bias": _bias(fields)}):
        replaced["logit_bias"] = kept.pop("logit_bias")
    return kept | {"temperature": temperature}, replaced


def _bias(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request's bias if it is well-formed; engines reject others."""
    bias = fields.get("logit_bias")
    well_formed = isinstance(bias, dict) and all(isinstance(value, int | float) for value in bias.values())
    return bias if well_formed else None
