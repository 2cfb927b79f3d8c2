"""The plot of a run."""

from pathlib import Path

import pytest

from raylight.trainer.output.plot import plot_rewards

PNG = b"\x89PNG"


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 0, "val/reward": 0.1}],
        [
            {"step": 1, "train/reward": 0.1, "time/rollout_s": 1.0},
            {"step": 2, "time/rollout_s": 1.0, "time/update_s": 0.5},
        ],
    ],
    ids=["nothing", "validation only", "a step without update"],
)
def test_a_plot_is_drawn_of_any_history(history: list[dict[str, float]], tmp_path: Path) -> None:
    plot_rewards(history, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)
