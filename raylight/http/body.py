"""Reading the body of a request: JSON in, a checked model out. Nothing is ignored: what is not known is refused by name."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from raylight.http.errors import RequestError

MAX_ENTRIES = 10_000
"""Of a list in a body, such as its messages."""
TOLD_PROBLEMS = 10
MANY_PROBLEMS = 1_000
PROBLEM_CHARS = 400


class Asked(BaseModel):
    """A part of a request. A field that is null is one that is not there, as in the SDKs; an unknown one is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @classmethod
    def read(cls, body: Any) -> Self:
        """Check a decoded body.

        Raises:
            RequestError: 400, with the fields that do not fit.
        """
        for name, value in body.items() if isinstance(body, dict) else ():
            if isinstance(value, list) and len(value) > MAX_ENTRIES:
                raise RequestError(f"{name:.100}: at most {MAX_ENTRIES} entries, not {len(value)}")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise RequestError(f"this endpoint does not support the request: {problems(error)}") from None


def problems(error: ValidationError) -> str:
    """The first things that do not fit, and how many there are. Of a great many none is named: to list them takes seconds."""
    count = error.error_count()
    if count > MANY_PROBLEMS:
        return f"{count} things in it do not fit"
    found = error.errors(include_url=False, include_input=False)
    told = [_problem(item)[:PROBLEM_CHARS] for item in found[:TOLD_PROBLEMS]]
    return "; ".join(told) + (f"; and {count - len(told)} more" if count > len(told) else "")


def _problem(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "body"
    if item["type"] == "extra_forbidden":
        return f"{path}: this field is not supported"
    if item["type"] == "union_tag_invalid":
        by, tag, known = (item["ctx"][name] for name in ("discriminator", "tag", "expected_tags"))
        return f"{path}: {by} {tag!r} is not supported; supported: {known}"
    return f"{path}: {item['msg']}"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """A part that shows an image at an address, `data:` or `https:`."""
    return {"type": "image_url", "image_url": {"url": url}}


def as_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a chat message: texts become one, a line each, which every engine takes; beside images they stay parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
