"""Four ranks with copies of the model in groups (HSDP) update it as one rank does, during a snapshot."""

from pathlib import Path

import pytest
import sharding_ranks
from rank_processes import run_ranks
from sharding_ranks import VARIANTS, save_untied_model


@pytest.mark.slow
def test_sharding_does_not_change_the_update(tmp_path: Path):
    save_untied_model(tmp_path)
    alone, four = (run_ranks(sharding_ranks.main, ranks, str(tmp_path), timeout_s=600)[0] for ranks in (1, 4))
    assert set(four) == set(VARIANTS)
    for name, found in four.items():
        expected = alone["lora-all" if name.startswith("lora") else "all"]
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert value == pytest.approx(expected[key], rel=1e-3, abs=2e-3), (name, key)
