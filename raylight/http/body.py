"""Models of request bodies that reject every unknown field, and the description of their errors."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from raylight.http.errors import RequestError
from raylight.types.request_fields import LABELS, PROTECTED

DESCRIBED_PROBLEMS = 10
"""Problems described in one error; the rest is counted."""
COUNTED_PROBLEMS = 1_000
"""Problems beyond which an error only counts them, because describing them takes seconds."""
PROBLEM_CHARS = 400
"""Length of one described problem, in characters."""

UNKNOWN_PARAMETER = "unknown_parameter"
"""OpenAI's code of a field that does not exist."""
PROBLEM_CODES = {"extra_forbidden": UNKNOWN_PARAMETER, "missing": "missing_required_parameter"}
"""OpenAI's codes of pydantic's errors."""


class RequestModel(BaseModel):
    """A part of a request.

    A field that is null counts as absent, as in the SDKs. An unknown field is rejected.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @classmethod
    def read(cls, body: object) -> Self:
        """Validate a decoded body.

        Raises:
            RequestError: 400, with the fields that are invalid.
        """
        try:
            return cls.model_validate(without_labels(body, cls.model_fields))
        except ValidationError as error:
            raise invalid_body(error, body) from None


def invalid_body(error: ValidationError, body: object) -> RequestError:
    """Return the error of an invalid body, with the code of its first problem."""
    kind = error.errors(include_url=False, include_input=False)[0]["type"]
    code = (
        "invalid_type" if kind.endswith(("_type", "_parsing")) else PROBLEM_CODES.get(kind, "invalid_value")
    )
    return RequestError(describe_problems(error, body), code=code)


def without_labels(body: object, kept: Container[str] = ()) -> object:
    """Return a decoded body without the labels of the request, which have no effect.

    Args:
        kept: labels that the request's model reads.
    """
    if not isinstance(body, dict) or LABELS.isdisjoint(body):
        return body
    return {name: value for name, value in body.items() if name not in LABELS or name in kept}


def describe_problems(error: ValidationError, body: object) -> str:
    """Describe the first invalid fields of a body, and count the others."""
    count = error.error_count()
    if count > COUNTED_PROBLEMS:
        return f"the body: {count} of its values are invalid"
    items = error.errors(include_url=False, include_input=False)
    first = [(item, field_path(item, body)) for item in items[:DESCRIBED_PROBLEMS]]
    described = [_describe(item, path)[:PROBLEM_CHARS] for item, path in first]
    more = f"; and {count - len(described)} more" if count > len(described) else ""
    unknown = [path for item, path in first if item["type"] == "extra_forbidden"]
    return "; ".join(described) + more + ignore_hint(unknown)


def ignore_hint(fields: Sequence[str]) -> str:
    """Return the end of an error that names unknown fields: the setting that drops them."""
    names = dict.fromkeys(re.sub(r"\[\d+\]", "", field) for field in fields)
    droppable = [name for name in names if name.rpartition(".")[2] not in PROTECTED and len(name) < 100]
    return f"; to drop unknown fields, set engine={{'ignore_fields': {droppable}}}" if droppable else ""


def field_path(item: Any, body: object) -> str:
    """Return the path of a pydantic error in the body as sent, such as `input[2].content[0].type`.

    Names of variants of a union, which pydantic adds to its locations, are left out.
    """
    location, is_missing = tuple(item["loc"]), item["type"] == "missing"
    steps = _steps(location, body, is_missing) or _steps(location, body, is_missing, exact=False) or []
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".") or "body"


def _steps(
    location: tuple[int | str, ...], value: object, is_missing: bool, *, exact: bool = True
) -> list[int | str] | None:
    """Return the steps of a location that lead into a value; None if the location does not fit it.

    Args:
        is_missing: True if the last step is a field that the value lacks.
        exact: False stops at a value of another type, such as a string that stands for a list of parts.
    """
    if not location:
        return []
    first, rest = location[0], location[1:]
    if isinstance(value, dict) and is_missing and not rest and first not in value:
        return [first]
    if isinstance(value, list) and isinstance(first, int) and first < len(value):
        inner = _steps(rest, value[first], is_missing, exact=exact)
        return None if inner is None else [first, *inner]
    if isinstance(value, dict) and first in value:
        inner = _steps(rest, value[first], is_missing, exact=exact)
        if inner is not None:
            return [first, *inner]
    if isinstance(value, dict | list) and rest:
        return _steps(rest, value, is_missing, exact=exact)  # the first step names a variant
    return None if exact else []


def _describe(item: Any, path: str) -> str:
    if item["type"] == "extra_forbidden":
        return f"{path}: this field is not supported"
    if item["type"] == "union_tag_invalid":
        by, tag, known = (item["ctx"][name] for name in ("discriminator", "tag", "expected_tags"))
        return f"{path}: {by} {tag!r} is not supported; supported: {known}"
    return f"{path}: {item['msg'].removeprefix('Value error, ')}"
