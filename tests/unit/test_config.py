"""Unknown keys and invalid values of settings are rejected, in `config.py` and in derived classes."""

from typing import Any

import pytest
from pydantic import ValidationError

from raylight.algorithms.policy import GRPO
from raylight.base_config import PEERS_NAMES
from raylight.config import (
    EngineConfig,
    LearnerConfig,
    RunnerConfig,
    StoreConfig,
)
from raylight.engines import registry
from raylight.errors import ConfigError
from raylight.trainer.spec.run_file import RunFile


@pytest.mark.parametrize(
    ("cls", "typo", "meant"),
    [
        (EngineConfig, "replica", "replicas"),
        (RunnerConfig, "max_concurent", "max_concurrent"),
        (LearnerConfig, "num_gpu", "num_gpus"),
        (StoreConfig, "lease_second", "lease_s"),
        *((GRPO, name, f"it has: .*{own}") for own, names in PEERS_NAMES.items() for name in names),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(cls: type, typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no setting '{typo}'.*{meant}"):
        cls(**{typo: 1})


def test_an_unknown_key_without_a_near_one_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        RunnerConfig(zzzzzz=1)
    assert all(name in str(caught.value) for name in RunnerConfig.model_fields)


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"replicas.*dtype.*no setting 'slots'"):
        EngineConfig(replicas=0, dtype="int4", slots=3)


@pytest.mark.parametrize(
    "wrong", [{"replicas": "many"}, {"port": 0}, {"port": 70000}, {"start_timeout_s": 0}, {"dtype": None}]
)
def test_a_value_that_does_not_fit_is_an_error_that_shows_it(wrong: dict) -> None:
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(**wrong)
    assert repr(value) in str(caught.value)


def test_an_error_shows_no_key() -> None:
    """A key that is wrong itself, and one among settings that do not fit together."""
    with pytest.raises(ConfigError, match=r"^EngineConfig\.api_key: Input should be a valid string$"):
        EngineConfig(api_key=["s3cret"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^EngineConfig: kind is 'upstream' and url is missing") as caught:
        EngineConfig(kind="upstream", api_key="s3cret")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^RunFile\.algorithm: Field required$"):
        RunFile(engine={"kind": "upstream", "url": "http://x", "api_key": "s3cret"})


def test_settings_come_from_nothing_a_dict_or_an_instance() -> None:
    assert RunnerConfig.parse(None) == RunnerConfig()
    assert RunnerConfig.parse({"n": 4}).n == 4
    assert RunnerConfig.parse(RunnerConfig(n=5)) == RunnerConfig(n=5)


@pytest.mark.parametrize(
    "given", [None, {}, {"max_restarts": 1}, RunnerConfig(max_restarts=1), {"n": None, "max_restarts": 1}]
)
def test_what_is_given_beside_settings_joins_them(given: object) -> None:
    parsed = RunnerConfig.parse(given, n=7)
    assert (parsed.n, parsed.max_restarts) == (7, 1 if given else 3)


@pytest.mark.parametrize("given", [{"n": 4}, RunnerConfig(n=4)])
def test_what_is_given_beside_settings_says_the_same(given: object) -> None:
    assert RunnerConfig.parse(given, n=4).n == RunnerConfig.parse(given, n=None).n == 4
    for other in (7, 1):
        with pytest.raises(
            ConfigError, match=f"RunnerConfig.n is 4 in the settings and {other} as an argument; give it once"
        ):
            RunnerConfig.parse(given, n=other)


def test_parsing_leaves_the_given_dict_alone() -> None:
    given = {"n": 4}
    RunnerConfig.parse(given, max_restarts=7)
    assert given == {"n": 4}


@pytest.mark.parametrize("given", [3, "n=4", ["n"], EngineConfig()])
def test_settings_of_another_type_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="takes a dict or a RunnerConfig"):
        RunnerConfig.parse(given)


def test_an_override_is_checked_like_any_value() -> None:
    with pytest.raises(ConfigError, match="n"):
        RunnerConfig.parse(RunnerConfig(), n=0)


def test_settings_do_not_change_after_creation() -> None:
    with pytest.raises(ValidationError):
        RunnerConfig().n = 2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"group_size": 1}, "group_size"),
        ({"grup_size": 4}, "group_size"),
        ({"n_steps": -1}, "n_steps"),
        ({"lr": 0}, "lr"),
        ({"rollout": {"max_attempts": 0}}, "RolloutConfig.max_attempts"),
        ({"rollout": {"retry": 1}}, "retry"),
    ],
)
def test_an_algorithm_refuses_what_it_cannot_mean(wrong: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GRPO(model="m", **wrong)


@pytest.mark.parametrize(
    ("tasks", "per_step", "epochs", "expected"),
    [(16, 16, 1, 1), (17, 16, 1, 2), (10, 4, 2, 5), (1, 16, 3, 1)],
)
def test_steps_cover_every_epoch(tasks: int, per_step: int, epochs: int, expected: int) -> None:
    assert GRPO(model="m", tasks_per_step=per_step, n_epochs=epochs).steps(tasks) == expected


def test_a_stated_number_of_steps_wins_even_if_it_is_zero() -> None:
    assert GRPO(model="m", n_steps=0, n_epochs=3).steps(100) == 0


@pytest.mark.parametrize(
    ("settings", "installed", "expected"),
    [
        ({}, True, "transformers"),
        ({}, False, "transformers"),
        ({"num_gpus": 1}, True, "vllm"),
        ({"num_gpus": 1}, False, "transformers"),
        ({"url": "http://model/v1"}, True, "upstream"),
        ({"kind": "transformers", "num_gpus": 1}, True, "transformers"),
        ({"kind": "vllm"}, True, "vllm"),
    ],
)
def test_auto_picks_by_what_is_there(
    settings: dict[str, Any], installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "has_vllm", lambda: installed)
    assert registry.choose_engine(EngineConfig(**settings)) == expected


def test_vllm_that_is_not_installed_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_vllm", lambda: False)
    with pytest.raises(ConfigError, match="pip install"):
        registry.choose_engine(EngineConfig(kind="vllm"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "upstream"}, "url"),
        ({"kind": "vllm", "url": "http://model/v1"}, "upstream"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
    ],
)
def test_engine_settings_that_do_not_fit(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**settings)


@pytest.mark.parametrize("kind", ["auto", "vllm", "transformers"])
def test_an_engine_on_several_gpus_is_a_tensor_parallel_one(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"num_gpus=2: .*tensor_parallel_size"):
        EngineConfig(kind=kind, num_gpus=2)
    assert EngineConfig(kind="my_package:Engine", num_gpus=2).num_gpus == 2


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"step_s": 3}, "step_s with kind='ranks'"),
        ({"kind": "simulated", "n": 2, "lora": {}}, "n, lora with kind='simulated'"),
        ({"kind": "local", "num_gpus": 1, "sync_s": 2}, "sync_s, num_gpus with kind='local'"),
    ],
)
def test_settings_that_a_kind_of_learner_does_not_read_are_refused(given: dict, unread: str) -> None:
    with pytest.raises(ConfigError, match=f"nothing reads {unread}"):
        LearnerConfig(**given)


def test_settings_of_each_kind_of_learner_are_accepted() -> None:
    for given in (
        {"kind": "simulated", "step_s": 30, "sync_s": 2, "long_rows": "drop"},
        {"kind": "local", "lora": {"rank": 4}, "gradient_checkpointing": True, "num_threads": 2},
    ):
        config = LearnerConfig(**given)
        assert LearnerConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("cls", "old", "new"),
    [
        (StoreConfig, {"lease_seconds": 7.0}, {"lease_s": 7.0}),
        (LearnerConfig, {"dtype": "fp32"}, {"dtype": "float32"}),
        (LearnerConfig, {"dtype": "bf16"}, {"dtype": "bfloat16"}),
    ],
)
def test_a_spelling_of_version_0_2_is_read_with_a_warning(cls: Any, old: Any, new: Any) -> None:
    with pytest.warns(DeprecationWarning, match=rf"raylight\.{cls.__name__}: .* is now {next(iter(new))}="):
        settings = cls(**old)
    assert settings == cls(**new)
