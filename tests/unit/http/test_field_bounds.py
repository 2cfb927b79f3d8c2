"""Bounds of request fields: values within them pass, an error names any other with its bounds."""

import math
from typing import Any

import pytest

from raylight.http.errors import RequestError
from raylight.http.field_bounds import BOUNDS, MAX_LOGPROBS, Number, check_answer_size, check_bounds

NUMBERS = {name: bound for name, bound in BOUNDS.items() if isinstance(bound, Number)}
EXTREMES: list[Any] = [2**63, 2**64 - 1, -(2**63) - 1, 1e308, -1e308, math.inf, math.nan, True, "3", [1], {}]
TOP = 2**31 - 1
WHOLE = "it must be a whole number from"
SHORTER = "at most 1000 characters are allowed, not 1001"
ABOVE, BELOW_INTEGER = "decimal_above_max_value", "integer_below_min_value"
LONG_ARRAY, LONG_STRING = "array_above_max_length", "string_above_max_length"


def problem_of(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_bounds(fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", NUMBERS)
def test_no_extreme_passes_and_each_error_names_the_field(name: str) -> None:
    for value in EXTREMES:
        error = problem_of(**{name: value})
        assert error.param == name
        assert error.message.startswith(f"{name}: it must be a")


@pytest.mark.parametrize(("name", "bound"), NUMBERS.items())
def test_a_bound_itself_passes_unless_it_is_excluded(name: str, bound: Number) -> None:
    check_bounds({name: bound.high})
    check_bounds({name: None})
    if bound.above:
        assert problem_of(**{name: bound.low}).code == "decimal_below_min_value"
    else:
        check_bounds({name: bound.low})


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"top_k": 2**63}, f"top_k: {WHOLE} -1 to {TOP}, not {2**63}", "integer_above_max_value"),
        ({"top_p": 0}, "top_p: it must be a number above 0 up to 1, not 0", "decimal_below_min_value"),
        ({"max_tokens": 2.5}, f"max_tokens: {WHOLE} 1 to {TOP}, not 2.5", "invalid_type"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7: it must be a number from -100 to 100, not 101", ABOVE),
        ({"logit_bias": {"-1": 1}}, "logit_bias: keys are token ids, not '-1'", "invalid_value"),
        ({"stop": ["a"] * 65}, "stop: at most 64 entries are allowed, not 65", LONG_ARRAY),
        ({"stop": "a" * 1001}, f"stop: {SHORTER}", LONG_STRING),
        ({"stop_sequences": ["a", "a" * 1001]}, f"stop_sequences[1]: {SHORTER}", LONG_STRING),
        ({"prompt": [[1], [2, -3]]}, f"prompt[1][1]: {WHOLE} 0 to {TOP}, not -3", BELOW_INTEGER),
        ({"prompt": ["a"] * 1025}, "prompt: at most 1024 entries are allowed, not 1025", LONG_ARRAY),
        ({"tokens": [2**40]}, f"tokens[0]: {WHOLE} 0 to {TOP}, not {2**40}", "integer_above_max_value"),
        (
            {"thinking": {"budget_tokens": -1}},
            f"thinking.budget_tokens: {WHOLE} 0 to {TOP}, not -1",
            BELOW_INTEGER,
        ),
        ({"logprobs": "yes"}, f"logprobs: {WHOLE} -1 to {TOP}, not 'yes'", "invalid_type"),
        ({"messages": [0] * 10_001}, "messages: at most 10000 entries are allowed, not 10001", LONG_ARRAY),
    ],
)
def test_an_error_has_the_path_the_bounds_and_openais_code(
    fields: dict[str, Any], message: str, code: str
) -> None:
    error = problem_of(**fields)
    assert error.message == message
    assert error.code == code


def test_labels_and_whole_floats_and_other_types_pass() -> None:
    check_bounds({"metadata": [0] * 10_001, "max_tool_calls": 1e308})
    check_bounds({"max_tokens": 3.0, "logprobs": True, "prompt": "hi", "stop": "x", "n": None})
    check_bounds({"logit_bias": "left to the engine", "stop_token_ids": 3, "unknown": 1e308})


def test_the_log_probs_of_an_answer_are_bounded_together() -> None:
    check_answer_size(8, MAX_LOGPROBS // 8, 0)
    with pytest.raises(RequestError, match="lower n, max_tokens or top_logprobs"):
        check_answer_size(8, MAX_LOGPROBS // 8, 1)
