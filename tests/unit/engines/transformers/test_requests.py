"""Requests to sampling parameters, and the record of these."""

from typing import Any

import pytest

from raylight.engines.transformers.reply import params_per_choice
from raylight.engines.transformers.requests import ChatRequest, CompletionRequest
from raylight.engines.transformers.sampling import SamplingParams
from raylight.http.errors import RequestError


def params_of(**settings: Any) -> SamplingParams:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **settings}
    return ChatRequest.read(body).params(9, 320, 0)


def test_missing_settings_are_openais_defaults() -> None:
    assert params_of() == SamplingParams(9)
    empty = {
        "temperature": None,
        "top_p": None,
        "stop": None,
        "n": None,
        "seed": None,
        "logit_bias": None,
        "min_p": None,
    }
    assert params_of(**empty) == SamplingParams(9)


def test_null_is_a_missing_field_also_if_the_engine_lacks_it() -> None:
    tool = {"type": "function", "function": {"name": "add", "strict": None}, "defer_loading": None}
    lacking = {"functions": None, "audio": None, "web_search_options": None, "tools": [tool]}
    assert params_of(**lacking) == SamplingParams(9)
    completion = CompletionRequest.read({"model": "m", "prompt": "hi", "suffix": None, "best_of": None})
    assert completion.prompt == "hi"
    with pytest.raises(RequestError, match="model: Field required"):
        CompletionRequest.read({"model": None, "prompt": "hi"})


def test_every_setting_arrives() -> None:
    given = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "stop": ["a", "b"],
        "seed": 4,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -2},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5, 300],
    }
    assert params_of(**given) == SamplingParams(
        9,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        stop=("a", "b"),
        seed=4,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias=((7, -2),),
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(5, 300),
    )


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_limit_has_two_spellings(top_k: int) -> None:
    assert params_of(top_k=top_k).top_k == 0


@pytest.mark.parametrize("body", [None, 3, "text", []])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(RequestError, match="body"):
        ChatRequest.read(body)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"stream_options:.*unheard:"):
        params_of(stream_options=3, unheard=1)
    with pytest.raises(RequestError, match=r"n:.*top_k:"):
        params_of(n=0, top_k=2**63)


def test_choices_of_a_seeded_request_have_seeds_of_their_own() -> None:
    assert [p.seed for p in params_per_choice(SamplingParams(1, seed=40), 3)] == [40, 41, 42]
    assert [p.seed for p in params_per_choice(SamplingParams(1), 3)] == [None] * 3


def test_a_record_shows_the_temperature_and_what_was_asked_for() -> None:
    assert SamplingParams(5, grammar=object()).as_record() == {
        "max_tokens": 5,
        "temperature": 1.0,
        "constrained": True,
    }
    told = SamplingParams(5, top_k=3, stop=("a",), logit_bias=((1, 2.0),)).as_record()
    assert told == {"max_tokens": 5, "temperature": 1.0, "top_k": 3, "stop": ["a"], "logit_bias": [(1, 2.0)]}
