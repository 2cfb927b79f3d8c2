"""Arguments of the Trainer: each is read or rejected before anything starts. No test here starts Ray."""

from typing import Any

import pytest
from unit_helpers import ReachedRay

from raylight._utils.synonyms import take_synonyms
from raylight.agent.decorators import rollout
from raylight.agent.hooks import Hook, LoggingHook
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM
from raylight.algorithms.base import Algorithm, FastAlgorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.decorator import algo
from raylight.algorithms.policy import GRPO
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.errors import ConfigError, DatasetError, HookError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.tasks.datasets import DevTaskLoader
from raylight.traces.messages import TraceToMessages
from raylight.traces.tracer import DummyTracer, OtelTracer
from raylight.traces.triplets import TracerTraceToTriplet
from raylight.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("planned_runs")


def plain(task: int) -> float:
    return 1.0


class Mine(Algorithm):
    n_epochs = 1

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...


class Fast(FastAlgorithm):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...


def reaches_ray(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ReachedRay):
        trainer.fit(*args, **kwargs)


# two words for the same


@pytest.mark.parametrize(
    ("one", "other", "value", "different"),
    [
        ("n_runners", "n_workers", 3, 4),
        ("initial_resources", "resources", {"a": 1}, {"a": 2}),
    ],
)
def test_an_argument_with_two_names_is_given_once(one: str, other: str, value: Any, different: Any) -> None:
    for arguments in ({one: value}, {other: value}, {one: value, other: value}):
        trainer = Trainer(**arguments)
        assert (trainer.runner.n, trainer.initial_resources) in [(3, {}), (1, {"a": 1})]
    with pytest.raises(ConfigError, match=f"{one} and {other} mean the same; give one of them"):
        Trainer(**{one: value, other: different})


def test_validation_data_has_two_names_in_every_method() -> None:
    trainer = Trainer(algorithm=Baseline())
    for method in (trainer.fit, trainer.dev):
        with pytest.raises(ConfigError, match="val_dataset and val_data mean the same"):
            method(plain, [1], [2], val_data=[3])


async def test_validation_data_has_two_names_in_train() -> None:
    with pytest.raises(ConfigError, match="val_dataset and val_data mean the same"):
        await Trainer(algorithm=Baseline()).train(plain, [1], [2], val_data=[3])


def test_two_names_are_compared_without_comparing_datasets() -> None:
    class Table:
        def __ne__(self, other: object) -> Any:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    def merged(a: Any, b: Any) -> Any:
        return take_synonyms({"a": a, "b": b}, {"b": "a"})["a"]

    table = Table()
    assert merged(table, None) is merged(None, table) is merged(table, table) is table
    assert merged(10**6, int("1000000")) == 10**6
    assert merged(None, None) is None
    with pytest.raises(ConfigError, match="a and b"):
        merged(table, Table())


# short words for settings


def test_short_words_set_what_they_stand_for() -> None:
    trainer = Trainer(
        n_runners=2,
        max_rollouts=7,
        n_learners=3,
        port=9001,
        engine={"replicas": 2},
        runner={"max_concurrent": 5},
    )
    assert trainer.runner == RunnerConfig(n=2, max_rollouts=7, max_concurrent=5)
    assert trainer.learner == LearnerConfig(n=3)
    assert trainer.engine == EngineConfig(port=9001, replicas=2)


@pytest.mark.parametrize(
    ("short", "settings", "field"),
    [
        ("n_runners", "runner", "n"),
        ("n_workers", "runner", "n"),
        ("max_rollouts", "runner", "max_rollouts"),
        ("n_learners", "learner", "n"),
        ("port", "engine", "port"),
    ],
)
def test_a_short_word_and_the_settings_say_the_same(short: str, settings: str, field: str) -> None:
    of_class = {"runner": RunnerConfig, "learner": LearnerConfig, "engine": EngineConfig}[settings]
    for given in ({field: 2}, of_class(**{field: 2})):
        assert getattr(getattr(Trainer(**{settings: given, short: 2}), settings), field) == 2
        with pytest.raises(
            ConfigError, match=rf"Config.{field} is 2 in the settings and 4 as an argument; give it once"
        ):
            Trainer(**{settings: given, short: 4})
    for silent in ({}, {field: None}, of_class()):
        assert getattr(getattr(Trainer(**{settings: silent, short: 4}), settings), field) == 4


def test_settings_may_be_instances() -> None:
    trainer = Trainer(
        engine=EngineConfig(replicas=2),
        runner=RunnerConfig(n=3),
        learner=LearnerConfig(n=2),
        store=StoreConfig(lease_s=5),
    )
    assert (trainer.engine.replicas, trainer.runner.n, trainer.learner.n) == (2, 3, 2)
    assert trainer.store == StoreConfig(lease_s=5)
    assert Trainer().store == StoreConfig()
    assert Trainer(store={"max_queued": 3}).store == StoreConfig(max_queued=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_runners": 0}, "RunnerConfig.n"),
        ({"max_rollouts": 0}, "RunnerConfig.max_rollouts"),
        ({"port": 0}, "EngineConfig.port"),
        ({"n_learners": 0}, "LearnerConfig.n"),
        ({"engine": {"slots": 1}}, "no setting 'slots'"),
        ({"runner": 3}, "takes a dict"),
        ({"learner": "many"}, "takes a dict"),
        ({"store": "store.db"}, "give a dict"),
        ({"store": {"size": 1}}, "no setting 'size'"),
        ({"store": StoreService()}, "StoreService"),
        ({"store": StoreClient(StoreService())}, "runners cannot reach"),
        ({"resources": LLM(model="x")}, "give them by name"),
        ({"initial_resources": [1]}, "give them by name"),
        ({"algorithm": 3}, "algorithm must be"),
        ({"algorithm": plain}, "algorithm"),
        ({"algorithm": "nowhere:A"}, "cannot import"),
        ({"algorithm": GRPO}, "model"),
        ({"algorithm": {"type": GRPO, "model": "m", "grup_size": 3}}, "grup_size"),
        ({"tracer": 3}, "tracer must be a Tracer"),
        ({"tracer": Baseline}, "tracer must be a Tracer"),
        ({"adapter": "x"}, "adapter"),
        ({"adapter": DummyTracer()}, "adapter must be a TraceAdapter"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(**wrong)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="n_runer"):
        Trainer(n_runer=3)  # type: ignore[call-arg]


# components


@pytest.mark.parametrize(
    "spec",
    [
        Mine(),
        Mine,
        "unit.trainer.test_trainer:Mine",
        "unit.trainer.test_trainer.Mine",
        {"type": Mine},
        {"type": "unit.trainer.test_trainer:Mine"},
        lambda: Mine(),
    ],
)
def test_an_algorithm_may_be_described(spec: Any) -> None:
    assert type(Trainer(algorithm=spec).algorithm).__name__ == "Mine"


def test_settings_of_a_described_algorithm_are_read() -> None:
    algorithm = Trainer(
        algorithm={"type": "raylight.algorithms.policy:GRPO", "model": "m", "group_size": 4}
    ).algorithm
    assert algorithm == GRPO(model="m", group_size=4)
    described = Trainer(algorithm={"type": Baseline, "max_queue_length": 2}).algorithm
    assert isinstance(described, Baseline)
    assert described.settings.max_queue_length == 2


def test_tracer_and_adapter_may_be_described() -> None:
    assert type(Trainer().tracer) is OtelTracer
    for spec in (DummyTracer(), DummyTracer, "raylight:DummyTracer", {"type": "raylight.DummyTracer"}):
        assert type(Trainer(tracer=spec).tracer) is DummyTracer
    traced = Trainer(tracer={"type": OtelTracer, "service_name": "mine"}).tracer
    assert isinstance(traced, OtelTracer)
    assert traced.service_name == "mine"
    assert Trainer().adapter is None
    for spec in (TraceToMessages(), TraceToMessages, "raylight:TraceToMessages"):
        assert type(Trainer(adapter=spec).adapter) is TraceToMessages


def test_an_adapter_given_by_its_arguments_makes_triplets() -> None:
    adapter = Trainer(adapter={"agent_match": "planner"}).adapter
    assert isinstance(adapter, TracerTraceToTriplet)
    assert adapter.agent_match == "planner"
    assert type(Trainer(adapter={"type": TraceToMessages}).adapter) is TraceToMessages
    with pytest.raises(
        ConfigError, match="adapter: TracerTraceToTriplet takes no 'agent_mtch'; it has: agent_match"
    ):
        Trainer(adapter={"agent_mtch": "planner"})


class Proxy:
    def __init__(self, port: int = 1) -> None:
        self.port = port


def test_a_proxy_may_be_anything_and_may_be_described() -> None:
    proxy = Proxy()
    assert Trainer(llm_proxy=proxy).llm_proxy is proxy
    assert Trainer().llm_proxy is None
    for spec in (
        Proxy,
        "unit.trainer.test_trainer:Proxy",
        {"type": Proxy, "port": 1},
        {"type": "unit.trainer.test_trainer.Proxy"},
    ):
        made = Trainer(llm_proxy=spec).llm_proxy
        assert (type(made).__name__, made.port) == ("Proxy", 1)


@pytest.mark.parametrize("wrong", [{"type": "raylight.StoreClient"}, "raylight:StoreClient", StoreClient, 3])
def test_a_store_is_not_described(wrong: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"store is .*; give a dict of settings \(lease_s.*, a StoreConfig, or the StoreClient",
    ):
        Trainer(store=wrong)


# hooks


def test_hooks_are_one_several_or_none() -> None:
    one, other = LoggingHook(), LoggingHook()
    assert Trainer().hooks == Trainer(hooks=[]).hooks == ()
    assert Trainer(hooks=one).hooks == Trainer(hooks=[one]).hooks == (one,)
    assert Trainer(hooks=(hook for hook in (one, other))).hooks == (one, other)


class Duck:
    def on_rollout_end(self, *, rollout: Any) -> None: ...


class Unfillable(Hook):
    def on_trace_end(self, *, everything: Any) -> None:  # type: ignore[override]
        ...


def test_a_hook_need_not_be_of_our_class() -> None:
    duck = Duck()
    assert Trainer(hooks=duck).hooks == (duck,)


@pytest.mark.parametrize(
    "spec",
    [
        LoggingHook,
        "raylight:LoggingHook",
        "raylight.LoggingHook",
        {"type": LoggingHook},
        lambda: LoggingHook(),
        {"type": "raylight.LoggingHook", "level": 10},
    ],
)
def test_hooks_may_be_described(spec: Any) -> None:
    ready = LoggingHook()
    assert [type(hook) for hook in Trainer(hooks=spec).hooks] == [LoggingHook]
    several = Trainer(hooks=[ready, spec, Duck]).hooks
    assert several[0] is ready
    assert [type(hook) for hook in several] == [LoggingHook, LoggingHook, Duck]


@pytest.mark.parametrize("wrong", [3, [3], Unfillable(), [LoggingHook(), Unfillable()], Unfillable, Proxy])
def test_hooks_are_checked_before_any_runner_starts(wrong: Any) -> None:
    with pytest.raises(HookError):
        Trainer(hooks=wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("x", "hooks='x' is not a dotted name"),
        (["x"], "hooks='x' is not a dotted name"),
        ({}, "hooks as a dict needs a 'type'"),
        ({"level": 3}, "hooks as a dict needs a 'type', .* it has: 'level'"),
        ("raylight:LogingHook", "has no 'LogingHook'"),
        ({"type": LoggingHook, "lvl": 3}, "hooks: LoggingHook takes no 'lvl'"),
    ],
)
def test_hooks_that_cannot_be_built_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(hooks=wrong)


# epochs


def test_epochs_are_given_to_the_algorithm_that_has_them() -> None:
    assert Trainer(algorithm=GRPO(model="m"), num_epochs=3).algorithm == GRPO(model="m", n_epochs=3)
    mine = Mine()
    assert Trainer(algorithm=mine, num_epochs=3).algorithm is mine
    assert mine.n_epochs == 3
    baseline = Trainer(algorithm=Baseline(max_queue_length=9), num_epochs=3).algorithm
    assert isinstance(baseline, Baseline)
    assert (baseline.settings.n_epochs, baseline.settings.max_queue_length) == (3, 9)


def test_the_given_settings_stay_as_they_are() -> None:
    given = GRPO(model="m", rollout={"timeout_seconds": 5, "retry_condition": ["failed"]})
    trained = Trainer(algorithm=given, num_epochs=3).algorithm
    assert given.n_epochs == 1
    assert isinstance(trained, GRPO)
    assert trained.rollout == given.rollout


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Fast(), "Fast has no n_epochs"),
        (None, "the Trainer has no algorithm"),
        (algo(lambda store: None), "FunctionalAlgorithm has no n_epochs"),
        (GRPO(model="m", n_steps=5), "num_epochs and the algorithm's n_steps both"),
    ],
)
def test_epochs_that_nothing_reads_are_an_error(algorithm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(algorithm=algorithm, num_epochs=2)


@pytest.mark.parametrize("algorithm", [GRPO(model="m"), Baseline()])
def test_epochs_are_checked(algorithm: Any) -> None:
    with pytest.raises(ConfigError, match="num_epochs"):
        Trainer(algorithm=algorithm, num_epochs=0)


# what is given to fit


def test_fit_takes_agent_and_datasets_from_both_places(planned_runs: list[Any]) -> None:
    @rollout
    def other(task: int) -> float:
        return 2.0

    reaches_ray(Trainer(algorithm=Baseline()), plain, [1], [2])
    reaches_ray(Trainer(algorithm=Baseline(), agent=other), [1])
    reaches_ray(Trainer(algorithm=Baseline(), agent=other), [1], val_data=[2])
    reaches_ray(Trainer(algorithm=Baseline(), agent=other, train_dataset=[1], val_dataset=[2]))
    reaches_ray(
        Trainer(algorithm=Baseline(), agent=other, train_dataset=[7], val_dataset=[8]), plain, [1], [2]
    )
    reaches_ray(Trainer(algorithm=Baseline(), agent=other, train_dataset=[7]), train_dataset=[1])
    assert [(run.inputs.agent.__name__, run.inputs.train, run.inputs.val) for run in planned_runs] == [
        ("plain", [1], [2]),
        ("other", [1], None),
        ("other", [1], [2]),
        ("other", [1], [2]),
        ("plain", [1], [2]),
        ("other", [1], None),
    ]


class NotMade(LitAgent):
    def __init__(self, trained_agents: str | None = None) -> None:
        super().__init__(trained_agents=trained_agents)

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 1.0


decorated = rollout(plain)


@pytest.mark.parametrize(
    "spec",
    [
        NotMade,
        "unit.trainer.test_trainer:NotMade",
        "unit.trainer.test_trainer.decorated",
        "unit.trainer.test_trainer:plain",
        {"type": NotMade},
        {"type": "unit.trainer.test_trainer:NotMade", "trained_agents": "x"},
    ],
)
def test_an_agent_may_be_described(spec: Any, planned_runs: list[Any]) -> None:
    reaches_ray(Trainer(algorithm=Baseline()), spec, [1])
    reaches_ray(Trainer(algorithm=Baseline(), agent=spec), [1])
    reaches_ray(Trainer(algorithm=Baseline(), agent=plain, train_dataset=[1]), spec)
    assert all(isinstance(run.inputs.agent, LitAgent) for run in planned_runs)
    assert [run.inputs.train for run in planned_runs] == [[1]] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("agent", "agent='agent' is not a dotted name"),
        ({"type": NotMade, "size": 3}, "agent: NotMade takes no 'size'"),
        ({"size": 3}, "agent as a dict needs a 'type'"),
        ("unit.trainer.test_trainer:Nothing", "has no 'Nothing'"),
    ],
)
def test_an_agent_that_cannot_be_built_is_named(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(algorithm=Baseline()).fit(wrong, [1])


@pytest.mark.parametrize(
    ("trainer", "arguments"),
    [
        (Trainer(algorithm=Baseline()), ([1, 2],)),
        (Trainer(algorithm=Baseline()), (3, [1])),
        (Trainer(algorithm=Baseline()), ()),
        (Trainer(algorithm=Baseline(), agent=plain), ([1], [2])),
        (Trainer(algorithm=Baseline()), (Proxy, [1])),
        (Trainer(algorithm=Baseline(), agent=3), ()),
    ],
)
def test_what_is_no_agent_is_refused(trainer: Trainer, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"agent is .*; give a function decorated with @rollout or an instance of LitAgent"
    ):
        trainer.fit(*arguments)


def test_without_an_algorithm_fit_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no algorithm; give it one"):
        Trainer().fit(plain, [1])


async def test_train_checks_as_fit_does() -> None:
    with pytest.raises(ConfigError, match="no algorithm"):
        await Trainer().train(plain, [1])
    with pytest.raises(ReachedRay):
        await Trainer(algorithm=Fast()).train(plain, [1])


def test_a_loader_brings_tasks_and_resources(planned_runs: list[Any]) -> None:
    loader = DevTaskLoader(
        tasks=[1, 2], resources={"main_llm": LLM(endpoint="http://h/v1", model="m"), "a": 1}
    )
    with pytest.raises(ReachedRay):
        Trainer(n_workers=1, resources={"a": 2}).dev(plain, loader)
    (run,) = planned_runs
    assert (run.inputs.train, run.settings.resources) == ([1, 2], loader.resources | {"a": 2})
    with pytest.raises(ValueError, match="at least one task"):
        DevTaskLoader(tasks=[], resources={})


def test_a_generator_of_tasks_reaches_the_algorithm(planned_runs: list[Any]) -> None:
    reaches_ray(Trainer(algorithm=Fast()), plain, (n for n in range(3)), iter([4]))
    (run,) = planned_runs
    assert (run.train, run.val) == ([0, 1, 2], [4])


def test_datasets_of_an_algorithm_are_optional_but_tasks(planned_runs: list[Any]) -> None:
    reaches_ray(Trainer(algorithm=Fast()), plain)
    for wrong in ([], "tasks.json", {"a": 1}, 3):
        with pytest.raises(DatasetError, match="train_dataset"):
            Trainer(algorithm=Fast()).fit(plain, wrong)


# dev


def test_dev_runs_a_fast_algorithm_and_the_baseline_if_there_is_none(planned_runs: list[Any]) -> None:
    for trainer in (Trainer(), Trainer(algorithm=Fast())):
        with pytest.raises(ReachedRay):
            trainer.dev(plain, [1])
    reaches_ray(Trainer(dev=True), plain, [1])
    assert [type(run.algorithm) for run in planned_runs] == [
        Baseline,
        Fast,
        Baseline,
    ]


def test_dev_gives_the_algorithm_this_trainer(planned_runs: list[Any]) -> None:
    trainer = Trainer(algorithm=(fast := Fast()))
    with pytest.raises(ReachedRay):
        trainer.dev(plain, [1])
    assert fast.get_trainer() is trainer


async def test_train_does_what_dev_does_too(planned_runs: list[Any]) -> None:
    with pytest.raises(ReachedRay):
        await Trainer(dev=True).train(plain, [1])
    with pytest.raises(TypeError, match="FastAlgorithm"):
        await Trainer(dev=True, algorithm=Mine()).train(plain, [1])


@pytest.mark.parametrize("algorithm", [Mine(), GRPO(model="m")])
def test_dev_with_a_slow_algorithm_is_a_type_error(algorithm: Any) -> None:
    name = type(algorithm).__name__
    with pytest.raises(TypeError, match=rf"dev\(\) requires a FastAlgorithm, .* {name}; use Baseline"):
        Trainer(algorithm=algorithm).dev(plain, [1])
    with pytest.raises(TypeError, match=name):
        Trainer(algorithm=algorithm, dev=True).fit(plain, [1])
