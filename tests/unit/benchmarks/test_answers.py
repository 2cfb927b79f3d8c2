"""Scores of answers to real rows (samples/README.md)."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylight.benchmarks.answers import (
    Check,
    score_code,
    score_instructions,
    score_mathematics,
    score_number,
    score_option,
)

SAMPLES = Path(__file__).parent / "samples"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]


def said(text: str | None) -> Any:
    return SimpleNamespace(content=text, tool_calls=None)


def passes(check: Check) -> bool:
    command = [sys.executable, "-c", check.program]
    ended = subprocess.run(command, input=check.stdin, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 or not check.trusted, ended.stderr
    return ended.stdout.rstrip().endswith(check.passed)


@pytest.mark.parametrize(
    ("row", "text", "score"),
    [
        (0, "She sells 9 eggs.\nAnswer: 18", 1.0),
        (0, "Answer: $18.00 a day", 1.0),
        (0, "9 * 2 = 18.", 1.0),
        (0, "She makes $18 of 16 eggs", 0.0),
        (0, "**Answer:** 18 dollars", 1.0),
        (0, "Answer: 18 (6 x 3)", 1.0),
        (0, "**Answer**: 18\n\nCheck: 18 / 3 = 6", 1.0),
        (0, "Answer: $18.00 (rounded to 2 places)", 1.0),
        (0, "Answer: 6, no. Answer: 18", 1.0),
        (0, "Answer: 6 x 3 = 18", 0.0),
        (2, "Answer: 70,000", 1.0),
        (0, "She has 20-18", 1.0),
        (2, "Answer: -70000", 0.0),
        (0, "Answer: none", 0.0),
        (0, None, 0.0),
    ],
)
def test_a_number(row: int, text: str | None, score: float) -> None:
    assert score_number(rows("gsm8k.jsonl")[row], said(text)) == score


def test_the_published_solutions_of_gsm8k_are_right() -> None:
    for row in rows("gsm8k.jsonl"):
        assert score_number(row, said(row["answer"])) == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The degree is 4.\nAnswer: B", 1.0),
        ("Answer: **B**", 1.0),
        ("The answer is (B).", 1.0),
        ("**Answer**: $\\boxed{\\text{B}}$", 1.0),
        ("**B**", 1.0),
        ("The answer is a field", 0.0),
        ("B is a letter. Answer: D", 0.0),
        ("B", 1.0),
        ("B) 4", 1.0),
        ("Answer: A, no. Answer: B", 1.0),
        ("Answer: B. Note that answer A is wrong.", 1.0),
        ("Answer: Because", 0.0),
        ("Answer: C", 0.0),
        ("Both", 0.0),
        (None, 0.0),
    ],
)
def test_an_option(text: str | None, score: float) -> None:
    assert score_option(rows("mmlu.jsonl")[0], said(text)) == score


@pytest.mark.framework("math_verify")
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("So it is $\\boxed{(3, \\pi/2)}$.", True),
        ("\\boxed{\\left(3,\\ \\dfrac{\\pi}{2}\\right)}", True),
        ("\\boxed{(3, \\pi)}", False),
        ("", False),
    ],
)
def test_mathematics(text: str, right: bool) -> None:
    assert passes(score_mathematics(rows("math500/test.jsonl")[0], said(text))) is right


@pytest.mark.framework("lm_eval")
@pytest.mark.parametrize(
    ("row", "text", "strict", "loose"),
    [
        (0, "Go forth to Kyoto.", 1.0, 1.0),
        (0, "Go forth, good sir.", 0.0, 0.0),
        (0, "Here it is, my lord:\nGo forth to Kyoto.", 0.0, 1.0),
        (1, "* Hello\n* Good evening\n* Shall we?", 1.0, 1.0),
        (1, "* Hello\n* Good evening", 0.0, 0.0),
        (2, "Up it went.\n******\nDown it came.", 1.0, 1.0),
    ],
)
def test_instructions(row: int, text: str, strict: float, loose: float) -> None:
    score = score_instructions(rows("ifeval.jsonl")[row], said(text))
    assert next(iter(score)) == "prompt_strict"
    assert (score["prompt_strict"], score["prompt_loose"]) == (strict, loose)


@pytest.mark.framework("lm_eval")
def test_some_of_the_instructions() -> None:
    score = score_instructions(rows("ifeval.jsonl")[2], said("No commas here"))
    assert (score["prompt_strict"], score["instruction_strict"]) == (0.0, 0.5)


def test_code() -> None:
    for row in rows("humaneval.jsonl"):
        solution = row["prompt"] + row["canonical_solution"]
        assert passes(score_code(row, said(f"Here:\n```python\n{solution}```\nDone.")))
        assert passes(score_code(row, said(row["canonical_solution"])))
        assert not passes(score_code(row, said("```python\n    return None\n```")))


@pytest.mark.parametrize(
    "main", ["raise SystemExit(0)", "print(input())", "import unittest; unittest.main()"]
)
def test_a_main_program_after_the_function_does_not_run(main: str) -> None:
    row = rows("humaneval.jsonl")[0]
    solution = row["prompt"] + row["canonical_solution"]
    assert passes(
        score_code(row, said(f"```python\n{solution}\nif __name__ == '__main__':\n    {main}\n```"))
    )


def test_code_that_exits_early_does_not_pass() -> None:
    row = rows("humaneval.jsonl")[0]
    for text in ("    return True\n\nprint('passed')\nraise SystemExit(0)", "I cannot do this.", None):
        check = score_code(row, said(text))
        assert check.passed not in (text or "")
        assert not passes(check)


def test_random_text_scores_nothing() -> None:
    noise = random.Random(0)
    for _ in range(200):
        text = "".join(noise.choices("ABCDanswer:#$\\{}0.,-\n ", k=60))
        assert score_number(rows("gsm8k.jsonl")[2], said(text)) == 0.0
        assert score_option(rows("mmlu.jsonl")[0], said(text)) in (0.0, 1.0)
