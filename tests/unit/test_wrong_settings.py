"""Wrong types and extremes for every setting: each is a ConfigError at set-up that names the setting.

The settings are found by introspection, so that a new one without bounds fails here.
"""

import ast
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt
from command_runner import CliRunner
from openai import AsyncOpenAI
from pydantic import BaseModel
from syntax_trees import parsed

import raylight
import raylight.algorithms.minigrpo  # defines settings, as do the next two
import raylight.algorithms.policy_gradient
import raylight.tinker.serve
from raylight._utils.bounds import leaf_types
from raylight.agent.resources import LLM, SamplingParameters
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.baseline import BaselineSettings
from raylight.algorithms.gepa import GepaSettings
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.verl_config.keys import KEYS
from raylight.algorithms.verl_config.merged_config import flatten, verl_defaults
from raylight.base_config import Config
from raylight.cli import app
from raylight.errors import ConfigError, DatasetError, RaylightError
from raylight.tasks.datasets import MAX_ROWS
from raylight.trainer.runs.eval_run import EvalSettings
from raylight.trainer.spec.arguments import TrainerArguments
from raylight.trainer.spec.inputs import as_tasks
from raylight.trainer.spec.run_file import RunFile
from raylight.trainer.trainer import Trainer

REQUIRED: dict[str, dict[str, Any]] = {
    "RunFile": {"agent": "package:agent", "algorithm": {"name": "GRPO", "model": "m"}},
    "EvalSettings": {"model": "m"},
    "OPD": {"teacher": "t"},
    "TeacherConfig": {"model": "m"},
    "MiniGRPO": {"model": "m"},
    "BaselineSettings": {
        "n_epochs": 1,
        "train_split": 0.5,
        "polling_interval": 5.0,
        "max_queue_length": 4,
        "span_verbosity": "keys",
    },
}
HUGE = 10**400
NUMBERS = [math.inf, -math.inf, math.nan, HUGE, 1e308, -1e308, True, np.True_, "many", object(), [1]]
WRONG: dict[Any, list[Any]] = {
    int: [*NUMBERS, 10**18, -(10**18), 3.7, "inf"],
    float: [*NUMBERS, "inf", "nan", np.float64(math.inf), np.float32(math.nan)],
    bool: ["perhaps", 2, object(), math.nan, HUGE],
    str: [object(), 17, ["a", 1], "a\0b", "\ud800"],
    Literal: ["no such choice", 17, object(), HUGE],
    dict: [object(), 17, "text", HUGE],
    list: [object(), 17, HUGE],
    Config: [object(), 17, "text"],
}
PARSED = {"rollout_is_threshold", "rollout_rs_threshold"}
"""Texts with numbers, which a separate parser checks."""
FREE = {"resource_type", "teacher"}
"""Settings that take any text."""
INFINITE = {"timeout_seconds", "unresponsive_seconds", "max_seconds"}
"""Time limits for which infinity means no limit."""


def settings_classes(base: type[Config] = Config) -> Iterator[type[Config]]:
    for cls in base.__subclasses__():
        if cls.__module__.startswith("raylight."):
            yield cls
        yield from settings_classes(cls)


CLASSES = sorted(
    {cls for cls in settings_classes() if cls.__name__ != "VERL"},
    key=lambda cls: cls.__name__,
)


def kind_of(leaf: Any) -> Any:
    """Return the key of WRONG for a type; None if any value is allowed."""
    if get_origin(leaf) is Literal:
        return Literal
    origin = get_origin(leaf) or leaf
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return Config
    if origin in (int, float, bool, str, dict, list):
        return origin
    return str if origin is Path or getattr(origin, "__name__", "") == "SecretStr" else None


def wrong_values(cls: type[BaseModel], name: str) -> list[Any]:
    """Return values that fit no type of a field."""
    annotation = cls.model_fields[name].annotation
    kinds = {kind_of(leaf) for leaf in leaf_types(annotation) if leaf is not type(None)}
    if get_origin(annotation) is list:
        kinds = {list}
    if None in kinds or not kinds:
        return []
    if Config in kinds and dict in kinds:
        kinds.discard(dict)
    if name in INFINITE:
        return [value for value in WRONG[float] if not (isinstance(value, float) and value == math.inf)]
    lists = [WRONG[kind] for kind in kinds]
    if len(lists) == 1:
        return lists[0]
    # of several types: what none of them takes
    return [object(), *(math.inf, math.nan, True) * (float in kinds)]


def failure_of(build: Callable[[], Any], name: str, value: Any) -> str | None:
    """Return what is wrong with the error of a wrong value; None for a typed error that names the setting."""
    shown = f"{name}={type(value).__name__} {'huge' if value is HUGE else format(repr(value), '.40')}"
    try:
        build()
    except RaylightError as error:
        text = str(error)
        return None if name in text and len(text) < 1000 else f"{shown}: {text[:300]}"
    except BaseException as error:  # the test is about these
        return f"{shown}: {type(error).__name__} {str(error)[:200]}"
    return f"{shown}: accepted"


def check(cases: list[tuple[Callable[[], Any], str, Any]]) -> None:
    failures = [failure for case in cases if (failure := failure_of(*case))]
    assert not failures, f"{len(failures)} of {len(cases)}:\n" + "\n".join(failures)


def cases_of(
    cls: type[BaseModel], build: Callable[..., Any], fields: Iterable[str] = (), **required: Any
) -> list[tuple[Callable[[], Any], str, Any]]:
    return [
        (lambda name=name, value=value: build(**required | {name: value}), name, value)
        for name in fields or cls.model_fields
        if name not in FREE
        for value in wrong_values(cls, name)
    ]


def class_cases(cls: type[Config]) -> list[tuple[Callable[[], Any], str, Any]]:
    """Cases of the fields that a class defines or redefines; its bases have their own."""
    required = REQUIRED.get(cls.__name__, {}) | ({"model": "m"} if issubclass(cls, PolicyAlgorithm) else {})
    own = [name for name in cls.__annotations__ if name in cls.model_fields]
    return cases_of(cls, cls, own, **required) if own else []


def entry_cases() -> dict[str, list[tuple[Callable[[], Any], str, Any]]]:
    """Cases of the constructors that users call, by name."""
    client = AsyncOpenAI(api_key="none")
    shorthands = {"n_runners": "n", "max_rollouts": "max_rollouts", "n_learners": "n", "port": "port"}
    return {
        "Trainer": [
            *cases_of(
                TrainerArguments, lambda **values: Trainer(algorithm=raylight.GRPO(model="m"), **values)
            ),
            *(
                (lambda name=name, value=value: Trainer(**{name: value}), field, value)
                for name, field in shorthands.items()
                for value in WRONG[int]
            ),
        ],
        "Trainer.evaluate": cases_of(
            EvalSettings, lambda **values: Trainer().evaluate(str, [1], **{"model": "m"} | values)
        ),
        "APO": cases_of(ApoSettings, lambda **values: raylight.APO(client, **values)),
        "GEPA": cases_of(GepaSettings, lambda **values: raylight.GEPA(client, **values)),
        "Baseline": cases_of(BaselineSettings, raylight.Baseline),
        "MiniGRPO": cases_of(raylight.MiniGRPO, raylight.MiniGRPO, model="m"),
        "LLM": cases_of(SamplingParameters, lambda **values: LLM(sampling_parameters=values)),
        "GRPO.sampling_parameters": cases_of(
            SamplingParameters, lambda **values: raylight.GRPO(model="m", sampling_parameters=values)
        ),
    }


def has_bounds(field: Any) -> bool:
    kinds = {type(bound) for bound in (*field.metadata, *inner_metadata(field.annotation))}
    return bool({Ge, Gt} & kinds and {Le, Lt} & kinds)


def inner_metadata(annotation: Any) -> Iterator[Any]:
    """Yield the bounds inside a union, such as `Seed | None`."""
    for info in getattr(annotation, "__metadata__", ()):
        yield from info.metadata
    for part in get_args(annotation):
        yield from inner_metadata(part)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_number_has_bounds(cls: type[Config]) -> None:
    unbounded = []
    for name, field in cls.model_fields.items():
        leaves = set(leaf_types(field.annotation))
        if {int, float} & leaves and name not in PARSED and not has_bounds(field):
            unbounded.append(name)
    assert not unbounded, "give them bounds of raylight._utils.bounds"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_wrong_settings_are_typed_errors(cls: type[Config]) -> None:
    check(class_cases(cls))


@pytest.mark.parametrize("name", entry_cases())
def test_wrong_arguments_are_typed_errors(name: str) -> None:
    check(entry_cases()[name])


def verl_cases() -> list[tuple[Callable[[], Any], str, Any]]:
    base = {
        "data.train_batch_size": 8,
        "actor_rollout_ref.model.path": "m",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.name": "hf",
    }
    numbers = {
        key
        for key, value in flatten(verl_defaults(), ()).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    mapped = [rule.key for rule in KEYS.values() if rule.key in numbers and rule.target]
    return [
        (lambda key=key, value=value: Trainer(algorithm=raylight.VERL(base | {key: value})), key, value)
        for key in mapped
        for value in (math.inf, -math.inf, math.nan, HUGE, 1e308, -1e308)
    ]


def test_wrong_values_of_verls_keys_are_typed_errors() -> None:
    check(verl_cases())


def test_the_number_of_cases() -> None:
    count = sum(len(class_cases(cls)) for cls in CLASSES)
    count += sum(map(len, entry_cases().values())) + len(verl_cases())
    print(f"{count} wrong settings, 0 untyped")
    assert count >= 304


def test_every_settings_class_is_covered() -> None:
    """The classes are found after the imports above; one in another module would be missed."""
    names = {cls.__name__ for cls in CLASSES} | {"Config", "VERL"}
    missing = set()
    for file in Path(raylight.__file__).parent.rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if bases & names and node.name not in names:
                    missing.add(f"{file.name}: {node.name}")
    assert not missing, "import their modules here"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"group_size": np.int64(4), "lr": np.float32(0.5)}, (4, 0.5)),
        ({"group_size": "4", "lr": "0.5"}, (4, 0.5)),
        ({"group_size": 4.0, "lr": 1}, (4, 1.0)),
    ],
    ids=["numpy", "texts of YAML", "whole floats"],
)
def test_legal_values_of_other_types(given: dict[str, Any], expected: tuple[int, float]) -> None:
    algorithm = raylight.GRPO(model="m", **given)
    assert (algorithm.group_size, algorithm.lr) == expected
    assert raylight.GRPO(model="m", val_before_train=0).val_before_train is False


def test_a_step_has_a_limit_of_rollouts() -> None:
    with pytest.raises(
        ConfigError, match="tasks_per_step=100000 with group_size=10000 is more than 1,000,000"
    ):
        raylight.GRPO(model="m", tasks_per_step=100_000, group_size=10_000)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["quickstart", "--steps", str(10**18)], "n_steps"),
        (["quickstart", "--seed", "-1"], "seed"),
        (["quickstart", "--n-learners", str(10**9)], "n"),
        (["serve", "--model", "m", "--num-cpus", "inf"], "num_cpus"),
        (["serve", "--model", "m", "--num-gpus", "nan"], "num_gpus"),
        (["serve", "--model", "m", "--start-timeout", "inf"], "start_timeout_s"),
        (["serve", "--model", "m", "--max-model-len", str(10**18)], "max_model_len"),
        (["serve", "--model", "m", "--set", "engine.max_concurrent=1e400"], "max_concurrent"),
        (["runner", "package:agent", "--run", "r", "--wait", "inf"], "start_timeout_s"),
        (["runner", "package:agent", "--run", "r", "--max-rollouts", str(10**18)], "max_rollouts"),
        (["eval", "a:b", "--model", "m", "--data", "DATA", "--temperature", "nan"], "temperature"),
        (["eval", "a:b", "--model", "m", "--data", "DATA", "--samples", str(10**18)], "samples"),
        (["eval", "a:b", "--model", "m", "--data", "DATA", "--pass-reward", "inf"], "pass_reward"),
        (["eval", "a:b", "--model", "m", "--data", "DATA", "--set", "store.lease_s=.inf"], "lease"),
    ],
)
def test_wrong_options_are_typed_errors(arguments: list[str], name: str, tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("1\n")
    result = CliRunner().invoke(app, [str(data) if part == "DATA" else part for part in arguments])
    if isinstance(result.exception, SystemExit):  # the command line rejects it by itself
        assert (result.exception.code, "Invalid value for" in result.output) == (2, True)
    else:
        assert isinstance(result.exception, RaylightError), result.exception
        assert name in str(result.exception)


class Broken(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (range(10**9), "more than 10,000,000 tasks"),
        (range(10**18), "more than 10,000,000 tasks"),
        (Broken([1]), "cannot be read: OSError: the disk is gone"),
        ((iterator for iterator in [threading.Lock()]), "cannot be stored"),
        (17, "pass a list"),
        (object(), "pass a list"),
    ],
)
def test_wrong_datasets_are_typed_errors(dataset: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        as_tasks(dataset, "train_dataset", required=True)


def test_a_dataset_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ROWS == 10_000_000
    monkeypatch.setattr("raylight.tasks.datasets.MAX_ROWS", 10)
    with pytest.raises(DatasetError, match="more than 10 tasks"):
        as_tasks(iter(int, 1), "train_dataset", required=True)


def test_a_run_file_with_wrong_numbers() -> None:
    with pytest.raises(ConfigError, match="seed"):
        RunFile(agent="a:b", algorithm={"name": "GRPO", "model": "m"}, seed=2**40)
