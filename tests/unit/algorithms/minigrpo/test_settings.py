"""MiniGRPO's settings and arithmetic, without a model."""

import math

import pytest
import torch

import raylight as rl
from raylight.algorithms.base import Algorithm
from raylight.algorithms.minigrpo.loss import clipped_loss, group_advantages
from raylight.algorithms.minigrpo.rows import (
    AdvantageRow,
    advantage_rows,
    split_micro_batches,
    to_token_batch,
)
from raylight.algorithms.minigrpo.settings import PROJECTIONS, MiniGRPOSettings
from raylight.components import build_component
from raylight.errors import ConfigError
from raylight.experience.batch import TrainBatch
from raylight.trainer.trainer import Trainer
from raylight.types import Trajectory


def prompt_of(task):
    return str(task)


def reward_of(task, text):
    return 0.0


def row(prompt: int, mask: list[int], advantage: float = 1.0, version: int = 3) -> AdvantageRow:
    """Return a row whose token ids are their positions."""
    full = [0] * prompt + mask
    trajectory = Trajectory(
        "ro",
        list(range(len(full))),
        full,
        [-0.5 * m for m in full],
        [version if m else -1 for m in full],
        0.7,
    )
    return AdvantageRow(trajectory, advantage)


def test_the_default_adapter() -> None:
    lora = MiniGRPOSettings(model="m").lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (8, 16, 0.05, PROJECTIONS)
    assert MiniGRPOSettings(model="m").row_budget == 1024


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "trl"}, "needs prompt_of and reward_of; set them"),
        ({"backend": "trl", "prompt_of": prompt_of}, "needs reward_of; set them"),
        ({"prompt_of": prompt_of}, "read by backend='trl' only"),
        (
            {"backend": "trl", "prompt_of": prompt_of, "reward_of": reward_of, "port": 80},
            "nothing reads port",
        ),
        ({"learning_rate": 1}, "no setting 'learning_rate'"),
        ({"group_size": 1}, "group_size"),
        ({"max_new_tokens": 1024}, "leaves no tokens for a prompt"),
        ({"max_tokens_per_micro_batch": 512}, "max_tokens_per_micro_batch=512 is less than the longest row"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.MiniGRPO(model="m", **given)


def test_trainer_takes_it_as_an_instance_a_dict_and_a_name() -> None:
    for given in (
        rl.MiniGRPO(model="m"),
        {"type": rl.MiniGRPO, "model": "m"},
        {"type": "raylight.MiniGRPO", "model": "m", "lr": 1e-3},
    ):
        assert isinstance(Trainer(algorithm=given).algorithm, rl.MiniGRPO)
    assert Trainer(algorithm=rl.MiniGRPO(model="m"), num_epochs=3).algorithm.total_steps(8) == 6  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="no setting 'modle'"):
        build_component({"type": "raylight.MiniGRPO", "modle": "m"}, Algorithm, "algorithm")


def test_its_settings_can_be_written_to_config_yaml() -> None:
    import yaml

    hooks = {"prompt_of": prompt_of, "reward_of": reward_of}
    resolved = rl.MiniGRPO(model="m", backend="trl", **hooks).resolved()
    assert yaml.safe_load(yaml.safe_dump(resolved))["lora"]["target_modules"] == PROJECTIONS
    assert not hooks.keys() & resolved.keys()


def test_without_a_run_the_error_names_the_missing_part() -> None:
    with pytest.raises(ConfigError, match="run_context"):
        rl.MiniGRPO(model="m").get_run_context()


def test_steps_follow_from_epochs_and_tasks() -> None:
    assert MiniGRPOSettings(model="m", tasks_per_step=4, n_epochs=3).steps(5) == 4
    assert MiniGRPOSettings(model="m", n_steps=7).steps(5) == 7


def test_advantages_compare_within_a_group() -> None:
    rewards, groups = [1.0, 0.0, 5.0, 5.0, 0.0, 2.0], ["a", "a", "b", "b", "c", "c"]
    deviation = math.sqrt(0.5)
    found = group_advantages(rewards, groups)
    assert found == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, 0, 0, -1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-5
    )
    assert group_advantages(rewards, groups, by_std=False) == pytest.approx([0.5, -0.5, 0, 0, -1, 1])
    assert group_advantages([3.0], ["alone"]) == [0.0]


def test_rows_of_a_rollout_share_its_advantage() -> None:
    batch = TrainBatch([1.0, 0.0], ["g", "g"], [row(2, [1]).trajectory] * 3, [0, 0, 1])
    assert [row.advantage for row in advantage_rows(batch, [0.5, -0.5])] == [0.5, 0.5, -0.5]


def test_micro_batches_hold_no_more_than_the_limit_and_lose_nothing() -> None:
    rows = [row(2, [1] * size) for size in (1, 30, 7, 8, 2, 30, 5)]
    parts = list(split_micro_batches(rows, 40))
    assert sorted(r.length for part in parts for r in part) == sorted(r.length for r in rows)
    assert all(max(r.length for r in part) * len(part) <= 40 for part in parts)
    assert len(parts) == 4
    assert list(split_micro_batches([], 40)) == []


def test_tokens_name_the_state_that_predicts_each_trained_token() -> None:
    tokens = to_token_batch(
        [row(3, [1, 0, 1, 1]), row(2, [1], advantage=-2.0, version=4)], torch.device("cpu")
    )
    assert tokens.ids.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0]]
    assert tokens.targets.tolist() == [3, 5, 6, 2]
    assert tokens.positions.tolist() == [2, 4, 5, 7 + 1]
    assert tokens.versions.tolist() == [3, 3, 3, 4]
    assert tokens.advantages.tolist() == [1, 1, 1, -2]
    assert tokens.sampled_logprobs.tolist() == pytest.approx([-0.5] * 4)
    assert tokens.temperatures.tolist() == pytest.approx([0.7] * 4)


def test_the_objective_is_clipped_on_the_side_that_would_gain() -> None:
    ratios, advantages = torch.tensor([1.5, 0.5, 1.5, 0.5]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = clipped_loss(
        ratios.log(), torch.zeros(4), advantages, None, clip=(0.2, 0.3), kl_coef=0.0, tokens=8
    )
    assert float(loss.value) == pytest.approx(-(1.3 + 0.5 - 1.5 - 0.8) / 8)
    assert loss.clipped == 2
    assert loss.kl == 0


def test_the_divergence_from_the_reference_is_k3() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -2.0])
    loss = clipped_loss(
        logprobs, logprobs.detach(), torch.zeros(2), ref, clip=(0.2, 0.2), kl_coef=0.1, tokens=2
    )
    assert loss.kl == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    loss.value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.05 * (1 - math.exp(-0.5)), 0.0])


def test_trl_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylight.algorithms.minigrpo import trl_backend

    monkeypatch.setattr(trl_backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"raylight\[trl\]"):
        trl_backend.check_installed()
