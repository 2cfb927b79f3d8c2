"""Every input that a loss reads is checked, and the message names it."""

from typing import Any

import numpy as np
import pytest

from raylight.http.errors import RequestError
from raylight.tinker.datums import Datum, check_batch

TOKENS = np.arange(4)
FLOATS = np.ones(4, np.float32)
INFINITE = np.full(4, np.inf, np.float32)
POLICY: dict[str, Any] = {"target_tokens": TOKENS, "logprobs": FLOATS, "advantages": FLOATS}


def check(loss: str, inputs: dict[str, Any], tokens: Any = TOKENS, **settings: float) -> Any:
    return check_batch([Datum(tokens, inputs)], loss, settings, 10, 8)


def test_a_batch_has_the_complete_settings_of_its_loss() -> None:
    batch = check("ppo", {**POLICY, "weights": FLOATS}, clip_high_threshold=1.5)
    assert batch.settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    assert check("cispo", POLICY).settings == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}


@pytest.mark.parametrize(
    ("message", "loss", "inputs", "tokens", "settings"),
    [
        ("there is no loss 'sft'; there are cross_entropy", "sft", {}, TOKENS, {}),
        ("Tinker's own service defines stable_reinforce", "stable_reinforce", POLICY, TOKENS, {}),
        ("call forward_backward_custom", "custom", POLICY, TOKENS, {}),
        ("gspo needs sequence_ratio_mask", "gspo", POLICY, TOKENS, {}),
        (
            "sequence_ratio_mask: it marks no token",
            "gspo",
            {**POLICY, "sequence_ratio_mask": FLOATS * 0},
            TOKENS,
            {},
        ),
        ("ppo has no setting 'beta'; it has clip_low", "ppo", POLICY, TOKENS, {"beta": 1.0}),
        ("importance_sampling has no setting", "importance_sampling", POLICY, TOKENS, {"beta": 1.0}),
        ("beta is not finite", "dro", POLICY, TOKENS, {"beta": float("nan")}),
        (
            r"data\[0\].loss_fn_inputs: cross_entropy needs weights",
            "cross_entropy",
            {"target_tokens": TOKENS},
            TOKENS,
            {},
        ),
        ("ppo has no input 'mask'; it has", "ppo", {**POLICY, "mask": FLOATS}, TOKENS, {}),
        ("advantages: 3 values for 4 tokens", "ppo", {**POLICY, "advantages": FLOATS[:3]}, TOKENS, {}),
        ("logprobs: a value is not finite", "ppo", {**POLICY, "logprobs": INFINITE}, TOKENS, {}),
        (
            "target_tokens: 10 is not a token id; the model has those from 0 to 9",
            "ppo",
            {**POLICY, "target_tokens": TOKENS + 7},
            TOKENS,
            {},
        ),
        ("model_input: -1 is not a token id", "ppo", POLICY, TOKENS - 1, {}),
        ("model_input: 9 tokens, but this server takes 1 to 8", "ppo", POLICY, np.arange(9), {}),
        ("model_input: 0 tokens", "ppo", POLICY, np.arange(0), {}),
        ("target_tokens: 2 dimensions", "ppo", {**POLICY, "target_tokens": TOKENS.reshape(2, 2)}, TOKENS, {}),
    ],
)
def test_what_does_not_fit_is_refused(
    message: str, loss: str, inputs: dict[str, Any], tokens: Any, settings: dict[str, float]
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check(loss, inputs, tokens, **settings)
    assert caught.value.status == 400


def test_a_batch_without_examples_is_refused() -> None:
    with pytest.raises(RequestError, match="there is no datum"):
        check_batch([], "ppo", {}, 10, 8)


def test_all_data_have_the_same_inputs() -> None:
    """Weights of some only would be dropped."""
    data = [Datum(TOKENS, inputs) for inputs in (POLICY, POLICY, {**POLICY, "weights": FLOATS})]
    with pytest.raises(RequestError, match=r"data\[2\].loss_fn_inputs: weights is in only one"):
        check_batch(data, "ppo", {}, 10, 8)
