"""Write the questions of this folder: python examples/math_agent/make_data.py [--out FOLDER]

Ten templates with random numbers, in the format of Calc-X: `id`, `question`, `chain` (the steps, as
calculator calls with their results), `result`, `source`. The same seed gives the same files. sympy verifies
every step, and every result by an independent formula, before anything is written.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sympy

from examples.math_agent.config import DATA
from examples.math_agent.expressions import evaluate, parse, show

SEED = 7
SIZES = {"train": 24, "val": 8, "test": 8}
STEP = re.compile(r"<gadget id=\"calculator\">(.*?)</gadget>\n<output>(.*?)</output>")


@dataclass(frozen=True)
class Problem:
    """A question with its solution.

    Attributes:
        steps: expressions to calculate in order; `{0}` is the result of the first one.
        formula: the result in one expression, from the numbers of the question.
        result: the expected answer; None for the result of the last step.
    """

    question: str
    steps: list[str]
    formula: str
    result: str | None = None


def shopping(rng: random.Random) -> Problem:
    pens, books = rng.randint(3, 19), rng.randint(2, 9)
    pen, book = rng.randint(2, 7), rng.randint(11, 38)
    return Problem(
        f"A teacher buys {pens} pens at ${pen} each and {books} books at ${book} each. How many dollars does "
        "she pay?",
        [f"{pens}*{pen}", f"{books}*{book}", "{0}+{1}"],
        f"{pens}*{pen}+{books}*{book}",
    )


def discount(rng: random.Random) -> Problem:
    price, percent = rng.randint(12, 95) * 10, rng.choice([15, 20, 35, 40])
    return Problem(
        f"A bicycle costs {price} euros. In spring its price is lowered by {percent}%. What does it cost "
        "then, in euros?",
        [f"{price}*{percent}/100", f"{price}-{{0}}"],
        f"{price}*(1-{percent}/100)",
    )


def journey(rng: random.Random) -> Problem:
    slow, fast = rng.randint(40, 70), rng.randint(85, 130)
    first, second = rng.randint(2, 4), rng.randint(2, 5)
    return Problem(
        f"A train travels {first} hours at {slow} km/h and then {second} hours at {fast} km/h. What is its "
        "mean speed in km/h?",
        [f"{first}*{slow}", f"{second}*{fast}", "{0}+{1}", f"{first}+{second}", "{2}/{3}"],
        f"({first}*{slow}+{second}*{fast})/({first}+{second})",
    )


def tank(rng: random.Random) -> Problem:
    length, width, height = rng.randint(4, 12), rng.randint(3, 9), rng.randint(2, 6)
    used = rng.randint(7, 23)
    return Problem(
        f"A tank is {length} m long, {width} m wide and {height} m high, and full of water. {used} cubic "
        "metres are taken out. How many cubic metres remain?",
        [f"{length}*{width}*{height}", f"{{0}}-{used}"],
        f"{length}*{width}*{height}-{used}",
    )


def savings(rng: random.Random) -> Problem:
    start, rate, years = rng.randint(5, 40) * 100, rng.randint(2, 8), rng.randint(2, 4)
    return Problem(
        f"{start} dollars are saved at {rate}% interest a year, and the interest stays in the account. How "
        f"many dollars are there after {years} years?",
        [f"1+{rate}/100", f"{{0}}**{years}", f"{start}*{{1}}"],
        f"{start}*(1+{rate}/100)**{years}",
    )


def ladder(rng: random.Random) -> Problem:
    a, b = rng.choice([(3, 4), (5, 12), (8, 15), (7, 24), (20, 21)])
    scale = rng.randint(2, 9)
    return Problem(
        f"The legs of a right triangle are {a * scale} cm and {b * scale} cm long. How long is the third "
        "side, in cm?",
        [f"{a * scale}**2", f"{b * scale}**2", "{0}+{1}", "sqrt({2})"],
        f"sqrt({a * scale}**2+{b * scale}**2)",
    )


def recipe(rng: random.Random) -> Problem:
    above, below, guests = rng.randint(1, 4), rng.choice([5, 7, 8, 9]), rng.randint(11, 25)
    return Problem(
        f"One portion of soup takes {above}/{below} of a litre of stock. How many litres are needed for "
        f"{guests} portions? Give a fraction or a decimal number.",
        [f"{above}/{below}*{guests}"],
        f"{guests}*{above}/{below}",
    )


def choice(rng: random.Random) -> Problem:
    workers, days, more = rng.randint(4, 9), rng.randint(10, 24), rng.randint(2, 5)
    steps = [f"{workers}*{days}", f"{workers}+{more}", "{0}/{1}"]
    right = Fraction(workers * days, workers + more)
    offers = [right, right + 2, right - 1, right + Fraction(7, 2), right * 2]
    rng.shuffle(offers)
    options = ", ".join(f"({letter}) {show(offer)}" for letter, offer in zip("ABCDE", offers, strict=True))
    return Problem(
        f"{workers} workers build a wall in {days} days. How many days would {workers + more} such workers "
        f"take? Answer with the letter of the nearest option: {options}",
        steps,
        f"{workers}*{days}/({workers}+{more})",
        "ABCDE"[offers.index(right)],
    )


def pair(rng: random.Random) -> Problem:
    small, step = rng.randint(8, 40), rng.randint(3, 15)
    total = 2 * small + step
    return Problem(
        f"Two numbers add up to {total}, and one is larger than the other by {step}. Give both as a list, "
        "the smaller one first, such as [1, 2].",
        [f"({total}-{step})/2", f"{{0}}+{step}"],
        f"({total}+{step})/2",
        f"[{small}, {small + step}]",
    )


def garden(rng: random.Random) -> Problem:
    longer, times = rng.randint(3, 12), rng.randint(2, 4)
    return Problem(
        f"A garden is x metres wide, and {longer} metres longer than {times} times its width. Give its "
        "perimeter in terms of x.",
        [f"2*({times}+1)", f"2*{longer}"],
        f"2*{longer}",
        f"{2 * (times + 1)}*x + {2 * longer}",
    )


TEMPLATES: list[Callable[[random.Random], Problem]] = [
    shopping,
    discount,
    journey,
    tank,
    savings,
    ladder,
    recipe,
    choice,
    pair,
    garden,
]


def solve(problem: Problem) -> tuple[str, str]:
    """Return the chain of a problem, and its result."""
    outputs: list[str] = []
    lines = []
    for step in problem.steps:
        expression = step.format(*outputs)
        outputs.append(show(evaluate(parse(expression))))
        lines.append(f'<gadget id="calculator">{expression}</gadget>\n<output>{outputs[-1]}</output>')
    result = problem.result or outputs[-1]
    return "\n".join([*lines, f"<result>{result}</result>"]), result


def verify(chain: str, formula: str) -> None:
    """Verify every step of a chain with sympy, and the last one also by the formula.

    Raises:
        ValueError: a result is wrong.
    """
    found = STEP.findall(chain)
    pairs = [*found, (formula, found[-1][1])]
    for expression, output in pairs:
        # the text is our own, and safe to parse
        value, shown = sympy.sympify(expression, rational=True), sympy.Rational(output)
        if abs(value - shown) > abs(shown) * sympy.Rational(1, 10**9):
            raise ValueError(f"sympy finds {value} for {expression}, not {output}")


def make(seed: int = SEED) -> dict[str, list[dict[str, str]]]:
    """Return all questions by split, without duplicates."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < sum(SIZES.values()):
        template = TEMPLATES[len(rows) % len(TEMPLATES)]
        problem = template(rng)
        if problem.question in rows:
            continue
        chain, result = solve(problem)
        verify(chain, problem.formula)
        name = f"{template.__name__}-{len(rows) + 1:03d}"
        rows[problem.question] = {
            "id": name,
            "question": problem.question,
            "chain": chain,
            "result": result,
            "source": f"raylight/{template.__name__}",
        }
    shuffled = list(rows.values())
    rng.shuffle(shuffled)
    splits = {}
    for split, size in SIZES.items():
        splits[split], shuffled = shuffled[:size], shuffled[size:]
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the questions of the math agent.")
    parser.add_argument("--out", type=Path, default=DATA)
    folder = parser.parse_args().out
    for split, rows in make().items():
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)}")


if __name__ == "__main__":
    main()
