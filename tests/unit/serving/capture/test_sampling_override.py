"""`override_sampling`: calls of training rollouts are sampled from the policy's own distribution."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.experience.off_policy import off_policy_parameters
from raylight.serving.capture.sampling_override import OVERRIDDEN_KEY, SamplingOverride, override

AGENTS = {
    "temperature": 0.0,
    "top_p": 0.8,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 2},
    "seed": 7,
}
KEPT = {"max_tokens": 8, "stop": ["x"], "tools": [{"type": "function"}], "response_format": {"type": "text"}}


def test_all_that_changes_the_distribution_is_replaced() -> None:
    fields, replaced = override(KEPT | AGENTS, 0.7)
    assert fields == KEPT | {"temperature": 0.7}
    assert replaced == AGENTS
    assert off_policy_parameters(fields) == {}


@pytest.mark.parametrize(
    ("requested", "replaced"),
    [
        ({"temperature": 0.7}, {}),
        ({"temperature": 0.7, "top_p": 1, "top_k": -1, "seed": None, "presence_penalty": 0.0}, {}),
        ({"temperature": 0.7, "logit_bias": {"5": -100}}, {}),
        ({}, {"temperature": 1.0}),
        ({"temperature": None}, {}),
        ({"temperature": 0.7, "seed": 1}, {"seed": 1}),
    ],
)
def test_neutral_values_and_bans_are_kept(requested: dict[str, Any], replaced: dict[str, Any]) -> None:
    fields, found = override(requested, 0.7)
    assert found == replaced
    assert fields["temperature"] == 0.7
    assert fields.get("logit_bias") == requested.get("logit_bias")


def test_what_no_engine_takes_is_left_to_the_engine() -> None:
    assert override({"logit_bias": "all"}, 1.0)[0]["logit_bias"] == "all"
    assert override({"logit_bias": {"5": "much"}}, 1.0)[0]["logit_bias"] == {"5": "much"}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_only_calls_of_training_rollouts_are_changed(path: str, trains: bool) -> None:
    seen: list[tuple[dict[str, Any], Any]] = []
    changed: list[None] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        from raylight.http.request import json_request

        seen.append(((await json_request(scope, receive)).fields, scope.get(OVERRIDDEN_KEY)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    app = SamplingOverride(inner, 1.0, lambda: changed.append(None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        token = SCOPE.set(AttemptScope("ro-1", "at-1", trains=trains))
        try:
            await client.post(
                path, content=json.dumps({"top_p": 0.5}), headers={"content-type": "application/json"}
            )
        finally:
            SCOPE.reset(token)
    replaced = trains and path != "/tokenize"
    assert seen == [({"temperature": 1.0}, {"top_p": 0.5}) if replaced else ({"top_p": 0.5}, None)]
    assert len(changed) == replaced
