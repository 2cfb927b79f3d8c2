"""Shapes example: the drawings, the model that is made, and three steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from example_modules import example_module, run_copy


def test_drawings_differ_by_shape_and_seed() -> None:
    drawing = example_module("shapes", "drawing")
    drawn = [
        {drawing.data_url(drawing.draw_shape(letter, seed)) for seed in range(20)}
        for letter in drawing.SHAPES
    ]
    assert all(len(seeds) > 10 for seeds in drawn)
    assert not any(one & other for one, other in itertools.combinations(drawn, 2))
    assert drawing.data_url(drawing.draw_shape("c", 3)) in drawn[0]


@pytest.mark.slow
def test_three_steps_train_on_images(tmp_path: Path) -> None:
    run_copy("shapes", tmp_path, "--steps", "3", "--cpu", "--output-dir", str(tmp_path / "out"))
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sum("learner/grad_norm" in step for step in steps) == 3
    assert all(step["mismatch/logprob_abs_max"] < 1e-3 for step in steps if "learner/grad_norm" in step)
    assert (tmp_path / "out" / "checkpoint" / "preprocessor_config.json").exists()
