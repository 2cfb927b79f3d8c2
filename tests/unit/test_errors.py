"""Errors: every typed error keeps its type, message and status on its way through Ray."""

import inspect
import pickle

import pytest

import raylight as rl
from raylight import errors
from raylight.errors import RaylightError
from raylight.http.errors import RequestError

ALL_ERRORS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, RaylightError)]


def test_there_are_errors_to_check() -> None:
    assert len(ALL_ERRORS) > 15


@pytest.mark.parametrize("cls", ALL_ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling(cls: type[RaylightError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("what happened; what to do next")))
    assert type(copy) is cls
    assert str(copy) == "what happened; what to do next"


def test_an_error_that_rejects_a_value_is_a_value_error() -> None:
    for refused in (
        lambda: rl.LLM(name="a", model="b"),
        lambda: rl.RolloutConfig(max_attempts=0),
        lambda: rl.rollout(lambda: None),
        lambda: rl.PromptTemplate(template="{x}").format(),
        lambda: rl.emit_reward(float("nan")),
    ):
        with pytest.raises(RaylightError) as caught:
            refused()
        assert isinstance(caught.value, ValueError)
        assert not isinstance(caught.value, TypeError)


def test_an_error_about_a_type_is_a_type_error_too() -> None:
    for wrong in (
        lambda: rl.emit_reward("high"),
        lambda: rl.emit_message(3),  # type: ignore[arg-type]
        lambda: rl.emit_exception("bad"),  # type: ignore[arg-type]
        lambda: rl.operation(3),  # type: ignore[call-overload]
    ):
        with pytest.raises(RaylightError) as caught:
            wrong()
        assert isinstance(caught.value, TypeError)


def test_an_otlp_error_survives_pickling_with_its_status() -> None:
    copy = pickle.loads(pickle.dumps(errors.OtlpError("too large", 413)))
    assert (str(copy), copy.status) == ("too large", 413)


def test_a_request_error_survives_pickling_with_its_status() -> None:
    copy = pickle.loads(pickle.dumps(RequestError("too many", 503, "overloaded_error")))
    assert (str(copy), copy.status, copy.kind) == ("too many", 503, "overloaded_error")
