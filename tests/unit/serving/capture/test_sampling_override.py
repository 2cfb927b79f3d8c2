"""`override`: calls of training rollouts are sampled from the policy's own distribution."""

from typing import Any

import pytest
from capture_helpers import ASKED, ENGINE, Call, FakeApp, Sink

from raylight.engines.capture_context import AttemptScope
from raylight.experience.trajectories.off_policy import off_policy_parameters
from raylight.serving.capture.middleware import CaptureMiddleware, override
from raylight.serving.capture.recorder import Recorder

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
    app, changed = FakeApp(), list[None]()
    capture = CaptureMiddleware(
        app,
        ENGINE,
        Recorder(Sink()),
        None,
        training_temperature=1.0,
        count_override=lambda: changed.append(None),
    )
    body = ASKED | {"top_p": 0.5}
    await Call(capture, body, path, AttemptScope("ro-1", "at-1", trains=trains)).answered()
    replaced = trains and path != "/tokenize"
    assert app.requests == [ASKED | {"temperature": 1.0} if replaced else body]
    assert [context.overridden for context in app.contexts if context] == (
        [] if path == "/tokenize" else [{"top_p": 0.5} if trains else {}]
    )
    assert len(changed) == replaced
