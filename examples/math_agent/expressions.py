"""Parser and evaluator of arithmetic expressions, without `eval`: a whitelist of syntax, with limits of size
and time.

Python's parser reads the text, and only whitelisted nodes are evaluated. Rational numbers are exact: 0.1 +
0.2 is 0.3.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import time
from collections.abc import Callable, Iterator
from fractions import Fraction

Number = Fraction | float

MAX_LENGTH = 500
"""Maximum number of characters of an expression."""
MAX_NODES = 250
MAX_DEPTH = 40
MAX_BITS = 4096
"""Maximum size of a numerator or denominator: 1233 digits."""
MAX_FACTORIAL = 500
TIME_S = 1.0
"""Time limit of one evaluation, in seconds; the limits above keep it far below."""


class ExpressionError(ValueError):
    """The text is not an expression, or exceeds a limit; the message may be shown to a model."""


SIGNS = str.maketrans(
    {
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{DOT OPERATOR}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DIVISION SIGN}": "/",
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{GREEK SMALL LETTER PI}": "pi",
        "\N{SQUARE ROOT}": "sqrt",
    }
)
NUMBER_BEFORE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*(?=[A-Za-z_(])(?![eE][+-]?\d)")
THOUSANDS = re.compile(r"(?<=\d)[,_](?=\d{3}(?!\d))")
CONSTANTS = {"pi": math.pi, "e": math.e}
BINARY: dict[type[ast.AST], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: (
        Fraction(a // b) if isinstance(a, Fraction) and isinstance(b, Fraction) else a // b
    ),
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: _power(a, b),
}
UNARY: dict[type[ast.AST], Callable[[Number], Number]] = {ast.UAdd: lambda a: +a, ast.USub: lambda a: -a}
CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict)


def parse(text: str, containers: bool = False) -> ast.expr:
    """Parse an expression; the tree holds only nodes that `evaluate` supports, and names.

    Args:
        containers: allow lists, tuples, sets, dicts and quoted words too.

    Raises:
        ExpressionError: the text is too long, too deeply nested, or holds another node.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"the expression has {len(text)} characters; {MAX_LENGTH} are allowed")
    try:
        tree = ast.parse(_python(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: too deeply nested
        raise ExpressionError(f"not an expression: {text[:80]!r} ({type(error).__name__})") from None
    for count, (node, depth) in enumerate(_walk(tree), 1):
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise ExpressionError(
                f"the expression has too many parts; {MAX_NODES}, nested {MAX_DEPTH} deep, are allowed"
            )
        if not _is_known(node, containers):
            raise ExpressionError(
                f"{type(node).__name__} is not allowed; write numbers, + - * / // % **, and "
                f"{', '.join(FUNCTIONS)}"
            )
    return tree


def names(tree: ast.expr) -> set[str]:
    """Return the unknowns of an expression: names that are neither constants nor functions."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}
    return found - CONSTANTS.keys()


def evaluate(tree: ast.expr, time_s: float = TIME_S) -> Number:
    """Return the value of an expression without unknowns: a Fraction if it is rational, else a float.

    Raises:
        ExpressionError: it has no value, exceeds a limit of size, or takes too long.
    """
    try:
        return _value(tree, time.monotonic() + time_s)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{type(error).__name__}: {error}") from None


def show(value: Number) -> str:
    """Format a number: integers in full, others with 12 significant digits.

    Raises:
        ExpressionError: it is too large for a decimal number.
    """
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        raise ExpressionError("the result is too large") from None


def _python(text: str) -> str:
    """Replace mathematical signs by Python's operators."""
    text = text.strip().translate(SIGNS).replace("^", "**")
    if not any(bracket in text for bracket in "([{"):  # inside brackets a comma separates items
        text = THOUSANDS.sub("", text)
    return NUMBER_BEFORE.sub(r"\1*", text).replace(")(", ")*(")


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    stack = [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))


def _is_known(node: ast.AST, containers: bool) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float) or (containers and type(value) is str)
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS
        case ast.BinOp(op=operation):
            return type(operation) in BINARY
        case ast.UnaryOp(op=operation):
            return type(operation) in UNARY
        case ast.Dict(keys=keys):
            return containers and None not in keys
        case ast.Name() | ast.operator() | ast.unaryop() | ast.expr_context():
            return True
    return containers and isinstance(node, CONTAINERS)


def _value(node: ast.expr, deadline: float) -> Number:
    if time.monotonic() > deadline:
        raise ExpressionError("the evaluation took too long")
    match node:
        case ast.Constant(value=int(value)):
            return _checked(Fraction(value))
        case ast.Constant(value=float(value)):
            return _checked(_decimal(value))
        case ast.Name(id=name):
            if name not in CONSTANTS:
                raise ExpressionError(f"{name!r} has no value")
            return CONSTANTS[name]
        case ast.UnaryOp():
            return UNARY[type(node.op)](_value(node.operand, deadline))
        case ast.BinOp():
            return _checked(BINARY[type(node.op)](_value(node.left, deadline), _value(node.right, deadline)))
        case ast.Call(func=ast.Name(id=name)):
            return _checked(FUNCTIONS[name](*(_value(argument, deadline) for argument in node.args)))
    raise ExpressionError(f"{type(node).__name__} is not a number")


def _decimal(value: float) -> Fraction:
    """The number as written: 1/10 for 0.1."""
    if not math.isfinite(value):
        raise ExpressionError("a number is too large")
    return Fraction(repr(value))


def _checked(value: Number) -> Number:
    """Return a result unchanged if it is a number within the limits; raise ExpressionError otherwise."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise ExpressionError(f"a number has more than {MAX_BITS} bits")
    elif not isinstance(value, float) or not math.isfinite(value):
        raise ExpressionError("the result is not a finite real number")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if not isinstance(base, Fraction) or not isinstance(exponent, Fraction) or exponent.denominator != 1:
        return float(base) ** float(exponent)  # `_checked` rejects a complex result
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_BITS:  # checked before the computation
        raise ExpressionError(f"the power would have more than {MAX_BITS} bits")
    return base**exponent.numerator


def _root(value: Number) -> Number:
    if isinstance(value, Fraction) and value >= 0:
        above, below = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if above * above == value.numerator and below * below == value.denominator:
            return Fraction(above, below)
    return math.sqrt(value)


def _whole(value: Number) -> int:
    if value != int(value):
        raise ExpressionError(f"{show(value)} is not a whole number")
    return int(value)


def _factorial(value: Number) -> Fraction:
    if not 0 <= value <= MAX_FACTORIAL:
        raise ExpressionError(f"factorial takes 0 to {MAX_FACTORIAL}")
    return Fraction(math.factorial(_whole(value)))


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    if not -50 <= digits <= 50:
        raise ExpressionError("round takes -50 to 50 digits")
    return (
        Fraction(round(value, _whole(digits)))
        if isinstance(value, Fraction)
        else _decimal(round(value, _whole(digits)))
    )


FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": _root,
    "abs": abs,
    "round": _round,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "min": min,
    "max": max,
    "factorial": _factorial,
    "gcd": lambda a, b: Fraction(math.gcd(_whole(a), _whole(b))),
    "lcm": lambda a, b: Fraction(math.lcm(_whole(a), _whole(b))),
    "exp": math.exp,
    "log": math.log,
    "ln": math.log,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
