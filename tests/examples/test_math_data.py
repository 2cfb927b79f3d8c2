"""The math agent's question files equal the script's output, and their results are correct."""

import re
import sys

import pytest
from math_helpers import ROOT

from examples.math_agent.config import DATA
from examples.math_agent.grading import is_right
from examples.math_agent.make_data import SIZES, STEP, main, make, verify
from raylight.trainer.spec.task_files import read_tasks


def test_the_files_are_what_the_seed_gives(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path)])
    main()
    for split, size in SIZES.items():
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (DATA / f"{split}.jsonl").read_bytes()
        assert len(read_tasks(DATA / f"{split}.jsonl")) == size
    assert DATA.is_relative_to(ROOT)


def test_no_question_is_in_two_splits_and_all_have_the_format() -> None:
    rows = [row for split in SIZES for row in read_tasks(DATA / f"{split}.jsonl")]
    assert len({row["question"] for row in rows}) == len({row["id"] for row in rows}) == sum(SIZES.values())
    for row in rows:
        assert list(row) == ["id", "question", "chain", "result", "source"]
        assert STEP.search(row["chain"])
        assert re.search(r"<result>(.*)</result>$", row["chain"])[1] == row["result"]
    assert make(seed=8) != make(seed=7)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow("each eighth shows it"))])
async def test_the_expected_result_is_graded_as_right(step: int) -> None:
    for row in read_tasks(DATA / "train.jsonl")[::step]:
        assert await is_right(row["result"], row["result"])
        assert not await is_right("-123456", row["result"])


def test_sympy_notices_a_wrong_step() -> None:
    chain = '<gadget id="calculator">2*3</gadget>\n<output>7</output>\n<result>7</result>'
    with pytest.raises(ValueError, match="sympy finds 6"):
        verify(chain, "7")
    with pytest.raises(ValueError, match="sympy finds 8"):
        verify(chain.replace("7", "6"), "8")
