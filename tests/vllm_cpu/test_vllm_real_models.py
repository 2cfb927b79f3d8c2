"""Pretrained models: vLLM, the transformers engine and the learner agree, before and after an update of all
weights or of an adapter, which peft loads too."""

import json
from pathlib import Path

import pytest
from real_models import real_model_folder
from vllm_helpers import run_program

from raylight.experience.settings.correction_settings import EXACT_LIMIT, HALF_LIMIT

LIMITS = {"float32": EXACT_LIMIT, "bfloat16": HALF_LIMIT}
"""Default limits of the mean difference, see docs/learning_correction.md."""


def compare(*arguments: str) -> dict[str, dict[str, float]]:
    found = json.loads(run_program("real_agreement.py", *arguments, timeout_s=3500).stdout.splitlines()[-1])
    print(arguments, json.dumps(found))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("name", "adapts"),
    [("smollm2", False), ("smollm2", True), ("gemma3", False)],
    ids=["smollm2", "smollm2-adapter", "gemma3"],
)
def test_engines_and_learner_agree_before_and_after_an_update(
    name: str, dtype: str, adapts: bool, tmp_path: Path
) -> None:
    found = compare(str(real_model_folder(name)), dtype, *[str(tmp_path / "model")] * adapts)
    for part in ("learner", "engine", "updated", *["peft"] * adapts):
        assert found[part]["mean"] < LIMITS[dtype] / 3, part  # without the warning of a run
    assert found["stale"]["mean"] > 2 * found["updated"]["mean"]
