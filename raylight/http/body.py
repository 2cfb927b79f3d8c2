"""Models of request bodies that reject every unknown field, and the description of their errors."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from raylight.http.errors import RequestError

MAX_ENTRIES = 10_000
"""Most entries of a list in a body, such as its messages."""
DESCRIBED_PROBLEMS = 10
"""Problems described in one error; the rest is counted."""
COUNTED_PROBLEMS = 1_000
"""Problems beyond which an error only counts them, because describing them takes seconds."""
PROBLEM_CHARS = 400
"""Length of one described problem, in characters."""


class RequestModel(BaseModel):
    """A part of a request.

    A field that is null counts as absent, as in the SDKs. An unknown field is rejected.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @classmethod
    def read(cls, body: Any) -> Self:
        """Validate a decoded body.

        Raises:
            RequestError: 400, with the fields that are invalid.
        """
        for name, value in body.items() if isinstance(body, dict) else ():
            if isinstance(value, list) and len(value) > MAX_ENTRIES:
                raise RequestError(
                    f"{name:.100}: at most {MAX_ENTRIES} entries are allowed, not {len(value)}"
                )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise RequestError(
                f"this endpoint does not support the request: {describe_problems(error)}"
            ) from None


def describe_problems(error: ValidationError) -> str:
    """Describe the first invalid fields, and count the others."""
    count = error.error_count()
    if count > COUNTED_PROBLEMS:
        return f"{count} of its values are invalid"
    items = error.errors(include_url=False, include_input=False)
    described = [_describe(item)[:PROBLEM_CHARS] for item in items[:DESCRIBED_PROBLEMS]]
    return "; ".join(described) + (f"; and {count - len(described)} more" if count > len(described) else "")


def _describe(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "body"
    if item["type"] == "extra_forbidden":
        return f"{path}: this field is not supported"
    if item["type"] == "union_tag_invalid":
        by, tag, known = (item["ctx"][name] for name in ("discriminator", "tag", "expected_tags"))
        return f"{path}: {by} {tag!r} is not supported; supported: {known}"
    return f"{path}: {item['msg']}"
