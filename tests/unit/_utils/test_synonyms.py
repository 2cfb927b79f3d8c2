"""Other names of arguments."""

import inspect
from typing import Any

import pytest

from raylight._utils.synonyms import accept_synonyms, take_synonyms
from raylight.errors import ConfigError


@accept_synonyms(old="new", worn="fresh")
def echo(first: Any = 0, new: Any = None, *rest: Any, fresh: Any = None) -> tuple[Any, ...]:
    """Return the arguments."""
    return first, new, rest, fresh


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, (0, None, (), None)),
        ((1,), {"old": 2}, (1, 2, (), None)),
        ((1, None), {"old": 2}, (1, 2, (), None)),
        ((1, 2), {"old": 2}, (1, 2, (), None)),
        ((1, 2, 3), {"worn": 4}, (1, 2, (3,), 4)),
        ((), {"old": None, "new": 5}, (0, 5, (), None)),
        ((), {"old": None}, (0, None, (), None)),
        ((), {"old": [1], "worn": {}}, (0, [1], (), {})),
    ],
)
def test_synonyms_are_passed_on_under_the_own_name(args: tuple, kwargs: dict, expected: tuple) -> None:
    assert echo(*args, **kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {"new": 1, "old": 2}), ((0, 1), {"old": 2}), ((), {"old": [1], "new": [1]})]
)
def test_an_argument_and_its_synonym_are_an_error(args: tuple, kwargs: dict) -> None:
    with pytest.raises(ConfigError, match="new and old mean the same; give one of them"):
        echo(*args, **kwargs)


def test_an_argument_given_by_place_and_name_stays_a_type_error() -> None:
    with pytest.raises(TypeError, match="multiple values"):
        echo(1, first=2, old=3)


def test_synonyms_do_not_show_in_the_signature() -> None:
    assert list(inspect.signature(echo).parameters) == ["first", "new", "rest", "fresh"]


def test_taking_synonyms_leaves_the_given_dict_alone() -> None:
    values = {"old": 1, "other": 2}
    assert take_synonyms(values, {"old": "new"}) == {"new": 1, "other": 2}
    assert values == {"old": 1, "other": 2}
