"""Bounds of the numbers in settings.

They are far above any use, and low enough that no number overflows, fills the memory, or delays the error to
a later step. A setting with a tighter bound states it in its field.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, Field

MAX_COUNT = 10**9
"""Upper bound of numbers of steps, rollouts, tokens, restarts and the like."""
MAX_PROCESSES = 10_000
"""Upper bound of processes, threads, CPUs and GPUs."""
MAX_CONCURRENT = 1_000_000
"""Upper bound of requests and rollouts at the same time."""
MAX_TASKS = 100_000
"""Upper bound of tasks per step."""
MAX_SAMPLES = 10_000
"""Upper bound of rollouts per task, and of parts of and passes over a batch."""
MAX_ROLLOUTS = 1_000_000
"""Upper bound of the rollouts of one step, whose inputs and tokens are in memory together."""
MAX_SECONDS = 1e8
"""Upper bound of time limits: about three years."""
MAX_FACTOR = 1e9
"""Upper bound of coefficients, learning rates and thresholds."""
MAX_SEED = 2**32 - 1
"""Largest seed that numpy accepts."""
MAX_BODY = 64 * 2**20
"""Largest body of a request by default, in bytes: 20 screenshots of 2 MB in base64 are 54 million."""
MAX_IMAGE_PIXELS = 178_956_970
"""Pixels of the largest image that Pillow opens: twice its own MAX_IMAGE_PIXELS."""
ENDLESS = 1_000_000
"""Number of steps of a training that ends when its user stops it."""

Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""Seed of random numbers."""


def is_number(value: object, low: float, high: float) -> bool:
    """Return True for a number from `low` to `high`; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def check_plain(model: type[BaseModel], field: str, value: object) -> object:
    """Return the value of a field, unless pydantic would accept it with another meaning.

    Raises:
        ValueError: a bool is given for a number, or a text cannot be part of a path or a request.
    """
    if _holds_bool(value) and _takes_number(model, field):
        raise ValueError("must be a number, not a bool")
    if isinstance(value, str) and ("\0" in value or (not value.isprintable() and _has_surrogates(value))):
        raise ValueError("must be Unicode text without zero characters")
    return value


def _holds_bool(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_bool(item) for item in value)
    return type(value).__name__ in ("bool", "bool_")  # numpy's is not a subclass


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


@functools.cache
def _takes_number(model: type[BaseModel], field: str) -> bool:
    kinds = set(leaf_types(model.model_fields[field].annotation))
    return bool(kinds & {int, float}) and bool not in kinds


def leaf_types(annotation: object) -> Iterator[object]:
    """Yield the types in a union, an annotated type, a list or a tuple."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated, tuple, list):
        for part in typing.get_args(annotation):
            yield from leaf_types(part)
    else:
        yield annotation
