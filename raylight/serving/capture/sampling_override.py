"""Middleware that sets the sampling of training rollouts, whatever their agents request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from raylight.engines.capture_context import SCOPE
from raylight.experience.off_policy import NEUTRAL, off_policy_parameters
from raylight.http.request import JsonRequest, json_request
from raylight.serving.dialects.registry import ChatDialect, CompletionsDialect

OVERRIDDEN_KEY = "raylight.overridden"
"""Key in the ASGI scope: the parameters that a request asked for and that were replaced."""
REMOVED = (*NEUTRAL, "seed")
"""Parameters that are removed. A seed would give all rollouts of a group the same random numbers."""


class SamplingOverride:
    """Samples training rollouts from the policy's own distribution at one temperature.

    It replaces the temperature and removes `top_p`, `top_k`, `min_p`, penalties, biases that ban nothing and
    the seed. Limits of length, stop words, schemas and tools stay as requested.

    Args:
        temperature: of all training rollouts.
        count: called for each request that is changed.
    """

    def __init__(self, app: ASGIApp, temperature: float, count: Callable[[], None]) -> None:
        self._app = app
        self._temperature = temperature
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        attempt = SCOPE.get()
        if (
            attempt is None
            or not attempt.trains
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"] not in (ChatDialect.path, CompletionsDialect.path)
        ):
            await self._app(scope, receive, send)
            return
        request = await json_request(scope, receive)
        fields, replaced = override(request.fields, self._temperature)
        if replaced:
            self._count()
            scope = {**scope, OVERRIDDEN_KEY: replaced}
        request = JsonRequest(fields, receive)
        await self._app(request.put_into(scope), request, send)


def override(fields: dict[str, Any], temperature: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request's fields with the training sampling, and the requested values that were replaced."""
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
