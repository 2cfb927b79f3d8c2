"""Four ranks with copies of the model in groups (HSDP) update it as one rank does, beside a snapshot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sharding_ranks import VARIANTS, save_untied_model


def updates(ranks: int, folder: Path) -> dict[str, dict[str, float]]:
    script = str(Path(__file__).parent / "sharding_ranks.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(folder)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    return json.loads(outputs[0].strip().splitlines()[-1])


@pytest.mark.slow
def test_sharding_does_not_change_the_update(tmp_path: Path):
    save_untied_model(tmp_path)
    alone, four = updates(1, tmp_path), updates(4, tmp_path)
    assert set(four) == set(VARIANTS)
    for name, found in four.items():
        expected = alone["lora-all" if name.startswith("lora") else "all"]
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert value == pytest.approx(expected[key], rel=1e-3, abs=2e-3), (name, key)
