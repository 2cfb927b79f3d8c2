"""Adding an algorithm takes one new file: its class is validated, planned and batched like built-in ones."""

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import yaml
from toy_algorithm import BestOfGroup
from toy_loss import at_most_doubled
from unit_helpers import ReachedRay, make_finished

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import build_batch
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.trainer import Trainer

MODEL = str(STARTER_MODEL)


def test_a_run_is_planned_with_it(planned_runs: list[Any], tmp_path: Path) -> None:
    algorithm = BestOfGroup(model=MODEL, tasks_per_step=2, n_epochs=3)
    with pytest.raises(ReachedRay):
        Trainer(algorithm=algorithm, output_dir=tmp_path).fit(lambda task: 1.0, list(range(4)))
    settings = planned_runs[0].settings
    assert (settings.training.total_steps, settings.training.algorithm.baseline_kind) == (6, "group")
    resolved = yaml.safe_load(yaml.safe_dump(settings.resolved()))["algorithm"]
    assert (resolved["name"], resolved["adv_estimator"]) == ("BestOfGroup", "best_of_group")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_sise": 2}, "BestOfGroup has no setting 'group_sise'; it has: group_size"),
        ({"group_size": 1}, "group_size"),
        ({"tau_pos": 2.0}, "nothing reads tau_pos"),
    ],
)
def test_its_settings_are_validated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BestOfGroup(model=MODEL, **settings)


def test_its_batches_follow_the_declared_baseline() -> None:
    algorithm = BestOfGroup(model=MODEL)
    alone = [make_finished(1.0, group="a"), make_finished(0.0, group="b")]
    assert not build_batch(alone, algorithm.batch_rules(LearnerConfig()))[1].has_signal
    equal = [make_finished(1.0, group="a"), make_finished(1.0, group="a")]
    assert not build_batch(equal, algorithm.batch_rules(LearnerConfig()))[1].has_signal
    batch, report = build_batch(
        [*equal, make_finished(0.0, group="a")], algorithm.batch_rules(LearnerConfig())
    )
    assert (batch.rewards, report.has_signal) == ([1.0, 1.0, 0.0], True)


def test_its_estimator_travels_with_the_settings_to_the_ranks() -> None:
    torch = pytest.importorskip("torch")
    algorithm = cloudpickle.loads(cloudpickle.dumps(BestOfGroup(model=MODEL)))
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.5], [0.2, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    advantages = algorithm.user_estimator(rewards, mask, np.array(["a", "a", "b"], dtype=object))
    assert advantages.tolist() == [[1.0, 1.0], [-1.0, -1.0], [1.0, 0.0]]


def test_a_loss_is_a_decorated_function_that_a_setting_names() -> None:
    torch = pytest.importorskip("torch")
    settings = BestOfGroup(model=MODEL, loss_mode="at_most_doubled").policy_settings()
    assert settings.user_loss is at_most_doubled
    old = torch.full((1, 3), 0.25).log()
    new = torch.tensor([[0.25, 0.5, 0.75]]).log().requires_grad_()
    at_most_doubled(new, old, torch.tensor([[1.0, -1.0, 1.0]])).sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-1.0, 2.0, 0.0]]))
