"""Grading of answers: by option, by number within 1 %, by the parts of a container, or by an equal
expression.

The model's text is never executed, and is compared within limits of length, size and time. Numbers are
compared here; expressions with unknowns need sympy, which runs in a separate process with a deadline
(symbolic.py).
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from examples.math_agent.expressions import ExpressionError, evaluate, names, parse

logger = logging.getLogger(__name__)

TOLERANCE = 0.01
"""Relative tolerance; the absolute tolerance for 0 is 1e-9."""
MAX_ITEMS = 64
"""Maximum size of a container that is compared without order."""
SYMPY_S = 5.0
"""Time limit of one comparison by sympy, in seconds."""
OUT_OF_LIMITS = 3
"""Exit status of the sympy process when an expression exceeds its limits."""

OPTION = re.compile(r"\(?([A-Ea-e])\)?[.:]?")
CHOSEN = re.compile(r"(?:option|answer)?\W*([A-Ea-e])(?:\W.*)?", re.IGNORECASE | re.DOTALL)
DIGITS = r"(?:\d{1,3}(?:[,_]\d{2,3})*[,_]\d{3}|\d+)(?:\.\d+)?"
"""Digits with commas between thousands; 1,2 is not 12."""
SCALES = {"dozen": 12.0, "hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9}
NUMBER = re.compile(
    rf"[$€£]?\s*(?P<sign>[-+]?)\s*[$€£]?\s*(?:(?P<whole>\d+)\s+)?(?P<number>{DIGITS}|\.\d+)(?P<exponent>[eE][-+]?\d{{1,3}})?"
    rf"(?:\s*/\s*(?P<below>{DIGITS}))?\s*(?:(?P<percent>%|percent)|(?P<scale>{'|'.join(SCALES)})\b)?"
    r"(?!\s*[abknpqxyz]\.?$)(?:\s*[A-Za-zµ°²³$€£]+\.?){0,3}\.?"  # 5x is not a number with a unit
)
ASSIGNED = re.compile(r"^\s*[A-Za-z]\w*\s*=(?!=)\s*")
LATEX = (
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\\(?:times|cdot)"), "*"),
    (re.compile(r"\\(?:left|right|[,;!])"), ""),
    (re.compile(r"\\pi"), "pi"),
)

LATEX_DEPTH = 4
"""Maximum nesting depth of LaTeX commands."""

T = TypeVar("T")
Leaf = Callable[[ast.expr, ast.expr], bool]
"""Function that compares two parts that are not containers."""


class GradingError(RuntimeError):
    """The comparison itself failed, so the answer has no grade."""


async def is_right(answer: str | None, expected: str) -> bool:
    """True if an answer, as the extractor returned it, is right.

    Raises:
        GradingError: the comparison itself failed.
    """
    if answer is None:
        return False
    answer, expected = bare(answer), bare(expected)
    if OPTION.fullmatch(expected):
        return chosen_option(answer) == chosen_option(expected)
    if " ".join(answer.casefold().split()) == " ".join(expected.casefold().split()):
        return True
    ours, theirs = number(expected), number(answer)
    if ours is not None and theirs is not None:
        return any(close(one, other) for one in ours for other in theirs)
    try:
        left, right = (parse(ASSIGNED.sub("", text), containers=True) for text in (answer, expected))
        return same(left, right, equal_values)
    except ExpressionError:
        return False
    except NeedsSympy:
        return await equal_by_sympy(ASSIGNED.sub("", answer), ASSIGNED.sub("", expected))


def bare(text: str) -> str:
    """The text without the LaTeX and the emphasis around it."""
    text = text.replace("\N{MINUS SIGN}", "-").strip().strip("*`").strip()
    text = text.removeprefix(r"\(").removesuffix(r"\)")
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
        text = text.strip("$")
    for _ in range(LATEX_DEPTH):
        for written, meant in LATEX:
            text = written.sub(meant, text)
    return text.removesuffix(".").strip()


def chosen_option(text: str) -> str | None:
    """The letter of the option that a text names first."""
    found = CHOSEN.fullmatch(text.strip())
    return found[1].upper() if found else None


def number(text: str) -> tuple[float, ...] | None:
    """Possible values of a text that is one number: 1,234.5, 3/4, 1 1/2, $12, 6e3, 42 apples; 25% is 25 and
    0.25, 5 million is 5 and 5,000,000. None if it is not a number."""
    found = NUMBER.fullmatch(text.strip()) if len(text) <= 100 else None
    if found is None or (found["whole"] and not found["below"]):
        return None
    value = float(re.sub("[,_]", "", found["number"]) + (found["exponent"] or ""))
    if found["below"]:
        below = float(re.sub("[,_]", "", found["below"]))
        if below == 0:
            return None
        value = value / below + float(found["whole"] or 0)
    if not math.isfinite(value):
        return None
    value = -value if found["sign"] == "-" else value
    scale = 0.01 if found["percent"] else SCALES.get(found["scale"])
    return (value,) if scale is None else (value, value * scale)


def close(expected: float, given: float) -> bool:
    """True if a number is within 1 % of the expected one."""
    return abs(given - expected) <= max(TOLERANCE * abs(expected), 1e-9)


class NeedsSympy(Exception):
    """Two parts hold unknowns, so that their values cannot be compared."""


def equal_values(given: ast.expr, expected: ast.expr) -> bool:
    """True if two expressions without unknowns have the same value, within 1 %.

    Raises:
        NeedsSympy: one has unknowns.
        ExpressionError: one has no value within the limits.
    """
    if isinstance(given, ast.Name) and names(given) and not names(expected):
        return False  # a word where a number is expected
    if names(given) or names(expected):
        raise NeedsSympy
    try:
        return close(float(evaluate(expected)), float(evaluate(given)))
    except OverflowError:
        raise ExpressionError("a number is too large to be compared") from None


def same(given: ast.expr, expected: ast.expr, leaf: Leaf) -> bool:
    """True if two trees are equal: lists and tuples in order, sets and dicts in any order, other parts by
    `leaf`.

    Raises:
        ExpressionError: a container has too many parts.
    """
    kinds = [_kind(node) for node in (given, expected)]
    if kinds[0] is not kinds[1]:
        return False
    match given, expected:
        case (ast.List() | ast.Tuple(), ast.List() | ast.Tuple()):
            pairs = zip(given.elts, expected.elts, strict=False)
            return len(given.elts) == len(expected.elts) and all(
                same(one, other, leaf) for one, other in pairs
            )
        case (ast.Set(), ast.Set()):
            return _match(given.elts, expected.elts, lambda one, other: same(one, other, leaf))
        case (ast.Dict(), ast.Dict()):
            ours, theirs = (
                [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
                for node in (given, expected)
            )
            return _match(
                ours,
                theirs,
                lambda one, other: all(same(a, b, leaf) for a, b in zip(one, other, strict=True)),
            )
        case (ast.Constant(value=str(one)), ast.Constant(value=str(other))):
            return one.strip().casefold() == other.strip().casefold()
    return leaf(given, expected)


def _kind(node: ast.expr) -> type:
    if isinstance(node, ast.List | ast.Tuple):
        return list
    if isinstance(node, ast.Set | ast.Dict):
        return type(node)
    return str if isinstance(node, ast.Constant) and isinstance(node.value, str) else float


def _match(given: list[T], expected: list[T], fits: Callable[[T, T], bool]) -> bool:
    """True if the items of two lists can be paired.

    Uses augmenting paths, because several may fit within 1 %.
    """
    if len(given) != len(expected):
        return False
    if len(given) > MAX_ITEMS:
        raise ExpressionError(f"a set of more than {MAX_ITEMS} parts cannot be compared")
    partners = [[j for j, other in enumerate(expected) if fits(one, other)] for one in given]
    partner_of: dict[int, int] = {}

    def pair(i: int, visited: set[int]) -> bool:
        for j in partners[i]:
            if j not in visited:
                visited.add(j)
                if j not in partner_of or pair(partner_of[j], visited):
                    partner_of[j] = i
                    return True
        return False

    return all(pair(i, set()) for i in range(len(given)))


async def equal_by_sympy(given: str, expected: str, deadline_s: float = SYMPY_S) -> bool:
    """True if sympy shows within the deadline that two texts with unknowns are equal; False if it cannot.

    Raises:
        GradingError: the sympy process failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "symbolic.py"),
        str(math.ceil(deadline_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(
            deadline_s + 5.0
        ):  # the process limits its CPU time; this is for a busy machine
            output, errors = await process.communicate(json.dumps([given, expected]).encode())
    except TimeoutError:
        logger.warning(
            "sympy did not decide within %g s whether %.80r is %.80r; the answer counts as wrong",
            deadline_s,
            given,
            expected,
        )
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == OUT_OF_LIMITS or (process.returncode or 0) < 0:  # a signal: out of CPU time
        logger.warning(
            "sympy could not decide within its limits whether %.80r is %.80r; the answer counts as wrong",
            given,
            expected,
        )
        return False
    if process.returncode != 0:
        raise GradingError(f"the comparison by sympy failed: {errors.decode(errors='replace')[-500:]}")
    return json.loads(output)
