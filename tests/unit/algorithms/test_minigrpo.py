"""MiniGRPO's settings: a local learner, or TRL's loop; without a model."""

import importlib.util

import pytest

import raylight as rl
from raylight.algorithms.base import BaseAlgorithm
from raylight.algorithms.minigrpo import PROJECTIONS
from raylight.algorithms.trl_grpo import TrlGRPO
from raylight.components import build_component
from raylight.errors import ConfigError, DatasetError
from raylight.trainer.trainer import Trainer


def prompt_of(task):
    return str(task)


def reward_of(task, text):
    return 0.0


HOOKS = {"prompt_of": prompt_of, "reward_of": reward_of}


def test_the_default_adapter() -> None:
    algorithm = rl.MiniGRPO(model="m")
    lora = algorithm.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (8, 16, 0.05, PROJECTIONS)
    assert algorithm.row_budget == 1024
    assert (algorithm.lr, algorithm.weight_decay, algorithm.tasks_per_step) == (1e-4, 0.0, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "trl"}, "needs prompt_of and reward_of; set them"),
        ({"backend": "trl", "prompt_of": prompt_of}, "needs reward_of; set them"),
        ({"prompt_of": prompt_of}, "read by backend='trl' only"),
        ({"backend": "trl", **HOOKS, "port": 80}, "nothing reads port"),
        ({"backend": "trl", **HOOKS, "patience": 2}, "nothing reads patience"),
        ({"learning_rate": 1}, "no setting 'learning_rate'"),
        ({"group_size": 1}, "group_size"),
        ({"max_new_tokens": 1024}, "leaves no tokens for a prompt"),
        ({"max_tokens_per_micro_batch": 512}, "max_tokens_per_micro_batch=512 is less than the longest row"),
        ({"passes": 2, "ppo_epochs": 2}, "passes is another name of ppo_epochs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.MiniGRPO(model="m", **given)


def test_trainer_takes_it_as_an_instance_a_dict_and_a_name() -> None:
    for given in (
        rl.MiniGRPO(model="m"),
        {"type": rl.MiniGRPO, "model": "m", "passes": 2},
        {"type": "raylight.MiniGRPO", "model": "m", "lr": 1e-3},
    ):
        assert isinstance(Trainer(algorithm=given).algorithm, rl.MiniGRPO)
    assert Trainer(algorithm=rl.MiniGRPO(model="m"), num_epochs=3).algorithm.steps(8) == 6  # type: ignore[union-attr]
    trl = {"type": "raylight.MiniGRPO", "model": "m", "backend": "trl", **HOOKS}
    trainer = Trainer(algorithm=trl, num_epochs=3)
    assert isinstance(trainer.algorithm, TrlGRPO)
    assert trainer.algorithm.total_steps(8) == 6
    with pytest.raises(ConfigError, match="takes no 'modle'"):
        build_component({"type": "raylight.MiniGRPO", "modle": "m"}, BaseAlgorithm, "algorithm")


def test_it_is_grpo_with_a_local_learner() -> None:
    algorithm = rl.MiniGRPO(
        model="m",
        max_model_len=64,
        max_new_tokens=8,
        passes=3,
        save_every=5,
        port=8123,
        dtype="bfloat16",
        seed=7,
    )
    assert isinstance(algorithm, rl.GRPO)
    assert algorithm.policy_settings().ppo_epochs == 3
    trainer = Trainer(algorithm=algorithm)
    learner, engine = trainer.learner, trainer.engine
    assert (learner.kind, learner.lora, learner.max_tokens_per_micro_batch) == ("local", algorithm.lora, 64)
    assert (engine.kind, engine.args, engine.dtype) == ("transformers", {"max_new_tokens": 8}, "bfloat16")
    assert (engine.max_model_len, engine.max_concurrent, engine.port) == (64, 16, 8123)
    assert (trainer.checkpoint.every, trainer.seed) == (5, 7)


def test_a_run_can_be_started_from_its_own_settings() -> None:
    first = Trainer(algorithm=rl.MiniGRPO(model="m", max_model_len=64, max_new_tokens=8, seed=1))
    again = Trainer(
        algorithm={"type": "raylight.MiniGRPO", **first.algorithm.arguments()},  # type: ignore[union-attr]
        engine=first.engine.model_dump(exclude={"api_key"}),
        learner=first.learner.model_dump(),
        checkpoint=first.checkpoint.model_dump(),
        seed=first.seed,
    )
    assert (again.engine, again.learner, again.seed) == (first.engine, first.learner, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": {"max_model_len": 512}}, "engine.max_model_len=512 contradicts MiniGRPO"),
        ({"learner": {"gradient_checkpointing": False}}, "learner.gradient_checkpointing=False contradicts"),
        ({"seed": 3}, "seed=3 is not MiniGRPO's, 4"),
    ],
)
def test_settings_of_the_trainer_that_contradict_it_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(algorithm=rl.MiniGRPO(model="m", seed=4), **arguments)


def test_its_settings_can_be_written_to_config_yaml() -> None:
    import yaml

    trl = rl.MiniGRPO(model="m", backend="trl", **HOOKS)
    for resolved in (TrlGRPO(trl).resolved(), trl.arguments(), rl.MiniGRPO(model="m").arguments()):
        assert yaml.safe_load(yaml.safe_dump(resolved))["lora"]["target_modules"] == PROJECTIONS
        assert not HOOKS.keys() & resolved.keys()


async def test_trl_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    algorithm = TrlGRPO(rl.MiniGRPO(model="m", backend="trl", **HOOKS))
    with pytest.raises(ConfigError, match=r"raylight\[trl\]"):
        await algorithm.run([1])
    with pytest.raises(DatasetError, match="train_dataset is missing"):
        await algorithm.run([])
