"""Compare two expressions with sympy, in a separate process that grading.py starts.

The argument is the CPU time limit in seconds, enforced by the kernel; stdin holds both texts as JSON. Prints
true or false.
"""

from __future__ import annotations

import ast
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sympy

from examples.math_agent.expressions import CONSTANTS, ExpressionError, evaluate, names, parse
from examples.math_agent.grading import OUT_OF_LIMITS, equal_values, same

MAX_MEMORY = 2 << 30
"""Limit of the address space, in bytes."""
MAX_EXPONENT = 50
"""Largest exponent of a base with unknowns, which sympy may expand."""
OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}
FUNCTIONS = {
    "sqrt": sympy.sqrt,
    "abs": sympy.Abs,
    "exp": sympy.exp,
    "log": sympy.log,
    "ln": sympy.log,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "factorial": sympy.factorial,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "min": sympy.Min,
    "max": sympy.Max,
}


def to_sympy(node: ast.expr) -> sympy.Expr:
    """Convert a checked tree to sympy. sympy's own parser is not used, because it executes its input.

    Raises:
        ExpressionError: the tree holds an unsupported node, or a power that is too large.
    """
    if not names(node) and not any(
        isinstance(part, ast.Call) or is_constant(part) for part in ast.walk(node)
    ):
        value = evaluate(node)  # within the limits of size
        return (
            sympy.Rational(value.numerator, value.denominator)
            if not isinstance(value, float)
            else _exact(node)
        )
    return _exact(node)


def is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in CONSTANTS


def _exact(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=value):
            return sympy.Rational(str(value))
        case ast.Name(id="pi"):
            return sympy.pi
        case ast.Name(id="e"):
            return sympy.E
        case ast.Name(id=name):
            return sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub()):
            return -to_sympy(node.operand)
        case ast.UnaryOp():
            return to_sympy(node.operand)
        case ast.BinOp(op=operation) if type(operation) in OPERATIONS:
            left, right = to_sympy(node.left), to_sympy(node.right)
            if isinstance(operation, ast.Pow) and right.is_number and abs(right) > MAX_EXPONENT:
                raise ExpressionError(f"an exponent is larger than {MAX_EXPONENT}")
            return OPERATIONS[type(operation)](left, right)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(to_sympy, node.args))
    raise ExpressionError(f"{ast.unparse(node)[:80]} is not supported with unknowns")


def equal(given: ast.expr, expected: ast.expr) -> bool:
    """True if two parts are equal: by value without unknowns, otherwise for all values of the unknowns."""
    if not names(given) and not names(expected):
        return equal_values(given, expected)
    difference = to_sympy(given) - to_sympy(expected)
    return bool(difference == 0 or sympy.simplify(difference) == 0)


def main() -> None:
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    given, expected = json.load(sys.stdin)
    try:
        found = same(parse(given, containers=True), parse(expected, containers=True), equal)
    except (
        ValueError,
        MemoryError,
        RecursionError,
        ArithmeticError,
        TypeError,
        NotImplementedError,
    ) as error:  # also sympy's own
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(OUT_OF_LIMITS)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
