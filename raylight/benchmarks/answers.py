"""Scores of text answers: numbers, options, mathematics, instructions, code. Pure functions.

A scorer takes a row of the data set and the model's message. Scorers that execute something return a `Check`,
which the agent runs in a sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from raylight.types import JsonObject

Row = JsonObject

NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
ANSWER = re.compile(r"answer\**\s*:", re.IGNORECASE)
OPTION = re.compile(r"(?i:answer)\**(?i:\s+is)?\s*:?[\s*$({]*(?:\\(?:boxed|text|mathrm)\{)*([A-D])\b")
FIRST_OPTION = re.compile(r"\A[\s*$({]*([A-D])\**(?:[).:}]|\s*\Z)")
CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
VERIFY = """
import json, sys
from math_verify import parse, verify

expected, text = json.load(sys.stdin)
print("right" if verify(parse("$" + expected + "$"), parse(text)) else "wrong")
"""


@dataclass(frozen=True)
class Check:
    """A Python program that decides about an answer: right if its last line of output is `passed`.

    Attributes:
        trusted: True for a program of raylight, whose failure is not the model's.
    """

    program: str
    passed: str
    stdin: str = ""
    timeout_s: float = 10.0
    trusted: bool = False


def score_number(row: Row, message: Any) -> float:
    """Compare the first number after the last "Answer:", or else the last number, with GSM8K's."""
    text = message.content or ""
    found = NUMBER.findall(_last_answer(text))[:1] or NUMBER.findall(text)[-1:]
    expected = row["answer"].rpartition("####")[2].strip()
    return float(bool(found) and _value(found[0]) == _value(expected))


def _last_answer(text: str) -> str:
    """Return a text from its last "Answer:" to its end; "" without one."""
    starts = [found.start() for found in ANSWER.finditer(text)]
    return text[starts[-1] :] if starts else ""


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def score_option(row: Row, message: Any) -> float:
    """Compare the letter after the last "Answer:" with MMLU's, or the letter with which the answer begins."""
    text = message.content or ""
    found = OPTION.findall(_last_answer(text))[:1] or OPTION.findall(text)[-1:] or FIRST_OPTION.findall(text)
    return float(bool(found) and found[0] == "ABCD"[row["answer"]])


def score_mathematics(row: Row, message: Any) -> Check:
    """Compare an answer, usually in \\boxed{}, with MATH's by math-verify, in a separate process."""
    content = json.dumps([row["answer"], message.content or ""])
    return Check(VERIFY, passed="right", stdin=content, timeout_s=60.0, trusted=True)


def score_instructions(row: Row, message: Any) -> dict[str, float]:
    """Check an answer with IFEval's own checkers: all instructions followed, strictly; then the other three
    of its measures, for which the instructions of a row are averaged."""
    from lm_eval.tasks.ifeval.utils import process_results

    found = process_results(row, [message.content or ""])
    return {
        "prompt_strict": float(found["prompt_level_strict_acc"]),
        "instruction_strict": fmean(found["inst_level_strict_acc"]),
        "prompt_loose": float(found["prompt_level_loose_acc"]),
        "instruction_loose": fmean(found["inst_level_loose_acc"]),
    }


def score_code(row: Row, message: Any) -> Check:
    """Run the hidden tests of HumanEval on an answer: its first block of code, or all of it.

    The answer is a whole function, or the rest of the function that the prompt begins. As in HumanEval's
    own harness it is not `__main__`, so that a main program after the function does not run. The last line
    of output is a secret, so that a program that exits early does not pass.
    """
    text = message.content or ""
    code = found[1] if (found := CODE.search(text)) else text
    passed = secrets.token_hex(16)
    tested = "\n".join([row["prompt"] + code, row["test"], f"check({row['entry_point']})"])
    return Check(f"exec({tested!r}, {{}})\nprint({passed!r})\n", passed)
