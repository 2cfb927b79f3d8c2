"""Bounds of request fields, the same for every dialect and engine.

Engines pass numbers to code with 32 or 64 bits, and one that does not fit there may end every request of a
batch, or the engine. So each value is checked at the door, under the name that the client gave it. An engine
may have narrower bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from raylight.http.errors import RequestError
from raylight.types.request_fields import LABELS

LARGEST = 2**31 - 1
"""Largest count of anything: engines keep counts in 32 bits."""
MAX_CHOICES = 1024
"""Most choices of one request, and most prompts."""
MAX_ENTRIES = 10_000
"""Most entries of a list without narrower bounds."""
MAX_LOGPROBS = 2**23
"""Most log-probs in the answer of one request. Each takes some hundred bytes until the answer is sent."""
INVALID_TYPE = "invalid_type"
"""OpenAI's code of a value with the wrong type."""


@dataclass(frozen=True)
class Violation:
    """A value beyond the bounds of its field.

    Attributes:
        text: clause about the value.
        code: OpenAI's code.
        path: place within the field, such as `[3]`.
    """

    text: str
    code: str
    path: str = ""


class Bound(Protocol):
    """Bounds of a field's value. Null counts as absent."""

    def find(self, value: object) -> Violation | None:
        """Return what is wrong with a value; None if nothing is."""
        ...


@dataclass(frozen=True)
class Number:
    """A finite number.

    Attributes:
        above: True if the low bound itself is excluded.
        whole: True for a whole number; 3.0 is one.
    """

    low: float
    high: float
    above: bool = False
    whole: bool = False

    def find(self, value: Any) -> Violation | None:
        kind = type(value)
        is_number = kind is int or (kind is float and (not self.whole or value.is_integer()))
        if is_number and (self.low < value if self.above else self.low <= value) and value <= self.high:
            return None
        text = f"it must be {self._described()}, not {value!r:.50}"
        if not is_number:
            return Violation(text, INVALID_TYPE)
        side = "above_max" if value > self.high else "below_min"
        return Violation(text, f"{'integer' if self.whole else 'decimal'}_{side}_value")

    def _described(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        span = f"above {self.low} up to" if self.above else f"from {self.low} to"
        return f"{kind} {span} {self.high}"


def count(low: int = 0, high: int = LARGEST) -> Number:
    return Number(low, high, whole=True)


@dataclass(frozen=True)
class Flag:
    """True or false, or a number within given bounds."""

    number: Number

    def find(self, value: object) -> Violation | None:
        return None if type(value) is bool else self.number.find(value)


@dataclass(frozen=True)
class Entries:
    """A list of bounded length.

    Attributes:
        most: entries.
        each: bounds of each entry; None: any value.
        single: True if a value without a list around it stands for a list of one.
    """

    most: int = MAX_ENTRIES
    each: Bound | None = None
    single: bool = False

    def find(self, value: object) -> Violation | None:
        if not isinstance(value, list):
            return self.each.find(value) if self.single and self.each is not None else None
        if len(value) > self.most:
            return Violation(
                f"at most {self.most} entries are allowed, not {len(value)}", "array_above_max_length"
            )
        if self.each is not None:
            for index, entry in enumerate(value):
                if (violation := self.each.find(entry)) is not None:
                    return Violation(violation.text, violation.code, f"[{index}]{violation.path}")
        return None


@dataclass(frozen=True)
class Text:
    """A string of bounded length; other types are left to the route's own model."""

    most: int

    def find(self, value: object) -> Violation | None:
        if not isinstance(value, str) or len(value) <= self.most:
            return None
        return Violation(
            f"at most {self.most} characters are allowed, not {len(value)}", "string_above_max_length"
        )


@dataclass(frozen=True)
class Biases:
    """Biases by token id."""

    def find(self, value: object) -> Violation | None:
        if not isinstance(value, dict):
            return None
        if len(value) > MAX_ENTRIES:
            return Violation(
                f"at most {MAX_ENTRIES} entries are allowed, not {len(value)}", "object_above_max_properties"
            )
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                return Violation(f"keys are token ids, not {key!r:.50}", "invalid_value")
            if (violation := BIAS.find(bias)) is not None:
                return Violation(violation.text, violation.code, f".{key}")
        return None


@dataclass(frozen=True)
class Prompts:
    """A text, a list of token ids, or a list of those."""

    def find(self, value: object) -> Violation | None:
        if not isinstance(value, list) or not value:
            return None
        if isinstance(value[0], str | list):
            return PROMPTS.find(value)
        return TOKENS.find(value)


@dataclass(frozen=True)
class Fields:
    """An object with bounds of some of its fields.

    Attributes:
        required: True if no other type may stand for it.
    """

    bounds: Mapping[str, Bound]
    required: bool = True

    def find(self, value: Any) -> Violation | None:
        if self.required and not isinstance(value, dict):
            return Violation(f"it must be an object, not {value!r:.50}", INVALID_TYPE)
        for name, bound in self.bounds.items() if isinstance(value, dict) else ():
            if (inner := value.get(name)) is not None and (violation := bound.find(inner)) is not None:
                return Violation(violation.text, violation.code, f".{name}{violation.path}")
        return None


BIAS = Number(-100, 100)
TOKEN = count()
TOKENS = Entries(200_000, TOKEN)
PROMPTS = Entries(MAX_CHOICES, Entries(200_000, TOKEN))
WORDS = Entries(64, Text(1_000), single=True)
"""Stop words: engines look for each of them after each token."""
BOUNDS: Mapping[str, Bound] = {
    "allowed_token_ids": TOKENS,
    "bad_words": Entries(1_000, Text(1_000)),
    "best_of": count(1, MAX_CHOICES),
    "frequency_penalty": Number(-2, 2),
    "length_penalty": Number(-10, 10),
    "logit_bias": Biases(),
    "logprob_token_ids": Entries(1_000, TOKEN),
    "logprobs": Flag(count(-1)),
    "max_completion_tokens": count(1),
    "max_output_tokens": count(1),
    "max_tokens": count(1),
    "min_p": Number(0, 1),
    "min_tokens": count(),
    "n": count(1, MAX_CHOICES),
    "presence_penalty": Number(-2, 2),
    "priority": count(-LARGEST),
    "prompt": Prompts(),
    "prompt_logprobs": count(-1),
    "repetition_detection": Fields(
        {"max_pattern_size": count(0, 1_000), "min_pattern_size": count(0, 1_000), "min_count": count()}
    ),
    "repetition_penalty": Number(0.01, 10),  # in 32 bits, less would be 0
    "routed_experts_prompt_start": count(),
    "seed": Number(-(2**63), 2**63 - 4097, whole=True),  # leaves room for one seed per choice
    "stop": WORDS,
    "stop_sequences": WORDS,
    "stop_token_ids": Entries(1_000, TOKEN),
    "stream_interval": count(1),
    "structured_outputs": Fields(
        {
            "choice": Entries(1_000, Text(1_000)),
            "grammar": Text(2**16),
            "json": Text(2**16),
            "regex": Text(1_000),
            "structural_tag": Text(2**16),
        }
    ),
    "temperature": Number(0, 10),
    "thinking": Fields({"budget_tokens": count()}, required=False),
    "thinking_token_budget": count(-1),
    "tokens": TOKENS,
    "tools": Entries(1_000),
    "top_k": count(-1),
    "top_logprobs": count(-1),
    "top_p": Number(0, 1, above=True),
    "truncate_prompt_tokens": count(-1),
}
"""Bounds by field, in any dialect. Other lists have up to `MAX_ENTRIES` entries."""
OTHER = Entries()


def check_bounds(body: Mapping[str, object]) -> None:
    """Check the values of a decoded request.

    Raises:
        RequestError: 400, values are beyond the bounds of their fields; it names all of them.
    """
    found = {
        f"{name:.100}{violation.path}": violation
        for name, value in body.items()
        if value is not None
        and name not in LABELS
        and (violation := BOUNDS.get(name, OTHER).find(value)) is not None
    }
    if found:
        path, first = next(iter(found.items()))
        described = "; ".join(f"{path}: {violation.text}" for path, violation in found.items())
        raise RequestError(described, code=first.code, param=path)


def check_answer_size(choices: int, max_tokens: int, top_logprobs: int) -> None:
    """Check that the answer of a request fits into memory.

    Args:
        choices: choices over all prompts.
        max_tokens: most tokens of each of them, within the model's context.
        top_logprobs: log-probs of each token besides its own.

    Raises:
        RequestError: 400, it may have more than `MAX_LOGPROBS` log-probs.
    """
    total = choices * max_tokens * (1 + top_logprobs)
    if total > MAX_LOGPROBS:
        raise RequestError(
            f"n: {choices} choices of up to {max_tokens} tokens with {1 + top_logprobs} log-probs each are "
            f"{total} log-probs, and at most {MAX_LOGPROBS} are allowed; lower n, max_tokens or top_logprobs"
        )
