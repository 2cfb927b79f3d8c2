"""Write the word problems of `data/`: python -m examples.small_gpu.make_problems

Each kind of problem is a text with random numbers and a formula. Train and test split have the same kinds
with other numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
PER_KIND = {"train": 20, "test": 4}
Draw = Callable[[int, int], int]


def shelf(n: Draw) -> tuple[str, float]:
    boards, books, lent = n(3, 8), n(12, 30), n(5, 20)
    text = (
        f"A shelf has {boards} boards with {books} books each. {lent} books are lent out. How many books "
        "are on the shelf?"
    )
    return text, boards * books - lent


def bakery(n: Draw) -> tuple[str, float]:
    trays, rolls, price = n(4, 12), n(10, 24), n(2, 5)
    text = (
        f"A baker bakes {trays} trays of {rolls} rolls and sells every roll for {price} coins. How many "
        "coins does she earn?"
    )
    return text, trays * rolls * price


def walk(n: Draw) -> tuple[str, float]:
    speed, hours, left = n(3, 6), n(2, 5), n(2, 9)
    text = (
        f"Hikers walk {hours} hours at {speed} km/h and then have {left} km left. How many km long is "
        "their way?"
    )
    return text, speed * hours + left


def share(n: Draw) -> tuple[str, float]:
    friends, each, over = n(3, 9), n(4, 15), n(1, 2)
    total = friends * each + over
    text = (
        f"{total} marbles are shared evenly among {friends} friends, and {over} remain. How many does "
        "each friend get?"
    )
    return text, each


def tank(n: Draw) -> tuple[str, float]:
    start, rate, minutes = n(200, 400), n(5, 15), n(4, 12)
    text = (
        f"A tank holds {start} litres. For {minutes} minutes {rate} litres a minute flow out. How many "
        "litres remain?"
    )
    return text, start - rate * minutes


def ages(n: Draw) -> tuple[str, float]:
    child, gap, years = n(4, 12), n(22, 35), n(3, 9)
    text = (
        f"A girl is {child} years old and her mother is {gap} years older. How old is the mother in "
        f"{years} years?"
    )
    return text, child + gap + years


def fence(n: Draw) -> tuple[str, float]:
    long, wide, price = n(8, 30), n(5, 20), n(3, 9)
    text = (
        f"A garden is {long} m long and {wide} m wide. A fence around it costs {price} euros a metre. "
        "What does the fence cost?"
    )
    return text, 2 * (long + wide) * price


def savings(n: Draw) -> tuple[str, float]:
    had, weekly, weeks, spent = n(10, 60), n(4, 12), n(5, 12), n(8, 30)
    text = (
        f"Ben has {had} euros, saves {weekly} euros a week for {weeks} weeks, and then spends {spent} "
        "euros. How many euros has he?"
    )
    return text, had + weekly * weeks - spent


def discount(n: Draw) -> tuple[str, float]:
    price, percent = 20 * n(2, 15), 5 * n(1, 9)
    text = f"A coat costs {price} euros. Its price is lowered by {percent}%. What does it cost now?"
    return text, price * (100 - percent) / 100


def mean(n: Draw) -> tuple[str, float]:
    a, b = n(10, 40), n(10, 40)
    c = 3 * n(10, 40) - (a + b) % 3
    text = f"On three days {a}, {b} and {c} people visited a museum. How many were that a day, on average?"
    return text, (a + b + c) / 3


def bus(n: Draw) -> tuple[str, float]:
    start, off, on = n(20, 45), n(4, 15), n(3, 18)
    text = (
        f"{start} people are on a bus. At a stop {off} get off and {on} get on. How many are on the bus now?"
    )
    return text, start - off + on


def ratio(n: Draw) -> tuple[str, float]:
    times, small = n(2, 6), n(6, 25)
    text = (
        f"A big crate weighs {times} times as much as a small one, which weighs {small} kg. How much do "
        "both weigh, in kg?"
    )
    return text, (times + 1) * small


KINDS = (shelf, bakery, walk, share, tank, ages, fence, savings, discount, mean, bus, ratio)


def make_problems(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Return problems by split: `id`, `question`, `answer` (a number). The splits share no question."""
    chance = random.Random(seed)
    made: dict[str, list[dict[str, Any]]] = {split: [] for split in PER_KIND}
    for kind in KINDS:
        found: dict[str, float] = {}
        while len(found) < sum(PER_KIND.values()):
            found.update([kind(chance.randint)])
        left = iter(found.items())
        for split, count in PER_KIND.items():
            for number in range(count):
                question, answer = next(left)
                made[split].append(
                    {"id": f"{kind.__name__}-{split}-{number}", "question": question, "answer": answer}
                )
    for problems in made.values():
        chance.shuffle(problems)
    return made


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for split, problems in make_problems().items():
        (DATA / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        print(f"{len(problems)} problems in data/{split}.jsonl")


if __name__ == "__main__":
    main()
