"""Algorithm classes and @algo functions."""

import functools
import gc
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest

from raylight.algorithms.base import Algorithm, FastAlgorithm
from raylight.algorithms.decorator import FunctionalAlgorithm, algo
from raylight.errors import ConfigError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.trace_adapter import TraceAdapter
from raylight.types import Span


class Names(TraceAdapter[list[str]]):
    def adapt(self, source: Sequence[Span], /) -> list[str]:
        return [span.name for span in source]


class Trainer:
    """Stand-in for a trainer, which supports weak references."""


class Silent(FastAlgorithm):
    """Algorithm that does not call `Algorithm.__init__`."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        self.seen.append((train_dataset, val_dataset))


class Waiting(Algorithm):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        pass


async def test_getters_return_what_was_set() -> None:
    algorithm, trainer, store, adapter = Silent(), Trainer(), StoreClient(StoreService()), Names()
    algorithm.set_trainer(trainer)
    algorithm.set_store(store)
    algorithm.set_adapter(adapter)
    algorithm.set_llm_proxy("proxy")
    algorithm.set_initial_resources({"llm": 1})
    assert algorithm.get_trainer() is trainer
    assert algorithm.get_store() is store
    assert algorithm.get_adapter() is adapter
    assert algorithm.get_llm_proxy() == "proxy"
    assert algorithm.get_initial_resources() == {"llm": 1}


@pytest.mark.parametrize("what", ["trainer", "store", "adapter"])
def test_a_missing_part_is_an_error_with_a_remedy(what: str) -> None:
    with pytest.raises(ConfigError, match=rf"Silent has no {what}; .*Trainer.* set_{what}\("):
        getattr(Silent(), f"get_{what}")()


def test_a_proxy_and_resources_are_optional() -> None:
    assert Silent().get_llm_proxy() is None
    assert Silent().get_initial_resources() is None


def test_an_adapter_is_kept_alive_but_a_trainer_is_not() -> None:
    algorithm = Silent()
    algorithm.set_adapter(Names())
    algorithm.set_trainer(Trainer())
    gc.collect(1)  # the objects of this test
    assert isinstance(algorithm.get_adapter(), Names)
    with pytest.raises(
        ConfigError, match="the trainer of Silent has been garbage-collected; keep a reference"
    ):
        algorithm.get_trainer()


def test_calling_it_runs_it() -> None:
    algorithm = Silent()
    algorithm([1], val_dataset=[2])
    assert algorithm.seen == [([1], [2])]


def test_is_async_is_what_run_is() -> None:
    assert Waiting().is_async()
    assert not Silent().is_async()


def test_an_algorithm_without_run_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="Empty must define run"):
        type("Empty", (Algorithm,), {})().run()


def test_an_algorithm_is_pickled_without_its_trainer() -> None:
    algorithm, trainer = Silent(), Trainer()
    algorithm.set_trainer(trainer)
    algorithm.set_initial_resources({"llm": 1})
    algorithm.seen.append(1)
    there = pickle.loads(pickle.dumps(algorithm))
    assert there.seen == [1]
    assert there.get_initial_resources() == {"llm": 1}
    with pytest.raises(ConfigError, match="no trainer"):
        there.get_trainer()


# @algo


def ready(function: Any) -> FunctionalAlgorithm:
    algorithm = algo(function)
    algorithm.set_store(StoreClient(StoreService()))
    algorithm.set_adapter(Names())
    algorithm.set_llm_proxy("proxy")
    algorithm.set_initial_resources({"llm": 1})
    return algorithm


async def test_a_function_gets_everything_that_it_asks_for() -> None:
    got = {}

    def everything(*, store, adapter, llm_proxy, initial_resources, train_dataset, val_dataset):  # type: ignore[no-untyped-def]
        got.update(locals())

    algorithm = ready(everything)
    assert algorithm.run([1], [2]) is None
    assert not algorithm.is_async()
    assert got == {
        "got": got,
        "store": algorithm.get_store(),
        "adapter": algorithm.get_adapter(),
        "llm_proxy": "proxy",
        "initial_resources": {"llm": 1},
        "train_dataset": [1],
        "val_dataset": [2],
    }


async def test_an_asynchronous_function_is_awaited() -> None:
    got = []

    async def positional(train_dataset, store, steps=3):  # type: ignore[no-untyped-def]
        got.append((train_dataset, steps))

    algorithm = ready(positional)
    assert algorithm.is_async()
    work = algorithm.run([1])
    assert inspect.isawaitable(work)
    await work
    assert got == [([1], 3)]


async def test_an_awaitable_of_a_plain_function_is_returned() -> None:
    got = []

    async def search(train_dataset: Any) -> None:
        got.append(train_dataset)

    work = ready(lambda train_dataset: search(train_dataset)).run([1])
    assert inspect.isawaitable(work), "otherwise the search would silently not run"
    await work
    assert got == [[1]]


def test_a_function_that_asks_for_nothing() -> None:
    got = []
    algo(lambda: got.append(1)).run()
    assert got == [1]


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_a_dataset_without_a_parameter_is_an_error(name: str) -> None:
    def needs_no_data(*, store):  # type: ignore[no-untyped-def]
        raise AssertionError

    with pytest.raises(
        TypeError, match=f"algorithm function needs_no_data has no parameter {name}, but a {name} was given"
    ):
        ready(needs_no_data).run(**{name: [1]})


def test_a_missing_value_is_none_or_the_default() -> None:
    got = []

    def required(llm_proxy, initial_resources, train_dataset, val_dataset):  # type: ignore[no-untyped-def]
        got.append((llm_proxy, initial_resources, train_dataset, val_dataset))

    def optional(
        store="s", adapter="a", llm_proxy="l", initial_resources="i", train_dataset=(), val_dataset=()
    ):  # type: ignore[no-untyped-def]
        got.append((store, adapter, llm_proxy, initial_resources, train_dataset, val_dataset))

    algo(required).run()
    algo(optional).run(val_dataset=[2])
    assert got == [(None, None, None, None), ("s", "a", "l", "i", (), [2])]


@pytest.mark.parametrize("name", ["store", "adapter"])
def test_a_function_without_its_required_part_is_an_error(name: str) -> None:
    algorithm = algo(lambda store, adapter: None)
    others = {
        "store": lambda: algorithm.set_adapter(Names()),
        "adapter": lambda: algorithm.set_store(StoreClient(StoreService())),
    }
    others[name]()
    with pytest.raises(ConfigError, match=f"algorithm function <lambda> has no {name}"):
        algorithm.run()


def test_calling_a_decorated_function_calls_the_function() -> None:
    @algo
    def double(train_dataset: int) -> int:
        """Twice."""
        return 2 * train_dataset

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


def asks(text: str) -> Any:
    return eval(f"lambda {text}: None")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("stor", "requires 'stor', which is not passed; did you mean 'store'?"),
        ("store, xyz", "requires 'xyz', which is not passed; the known ones are store, adapter"),
        ("self, store", "requires 'self'"),
        ("*args", r"has the parameter \*args, but parameters are passed by name"),
        ("**kwargs", r"has the parameter \*\*kwargs, but parameters are passed by name"),
        ("store, /", "has the parameter store, but parameters are passed by name"),
    ],
)
def test_unknown_parameters_are_an_error_at_decoration(parameters: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algo(asks(parameters))


@pytest.mark.parametrize("thing", [1, Silent, Silent(), dict])
def test_only_functions_are_decorated(thing: Any) -> None:
    with pytest.raises(ConfigError, match="@algo decorates a function, and got"):
        algo(thing)


def test_a_function_that_yields_is_refused() -> None:
    def yields(store: Any) -> Any:
        yield store

    with pytest.raises(ConfigError, match="yields is a generator function"):
        algo(yields)


async def test_a_partial_function_and_a_method_and_a_callable_object() -> None:
    got = []

    async def steps(store, n):  # type: ignore[no-untyped-def]
        got.append(n)

    class Callable:
        async def __call__(self, train_dataset: Any) -> None:
            got.append(train_dataset)

        def method(self, train_dataset: Any) -> None:
            got.append(train_dataset)

    for algorithm in (ready(functools.partial(steps, n=7)), algo(Callable())):
        assert algorithm.is_async()
    await ready(functools.partial(steps, n=7)).run()  # type: ignore[misc]
    await algo(Callable()).run([1])  # type: ignore[misc]
    algo(Callable().method).run([2])
    assert got == [7, [1], [2]]


async def test_a_local_function_is_pickled_by_value() -> None:
    factor = 3

    @algo
    async def scaled(train_dataset: list[int], initial_resources: Any) -> list[int]:
        return [factor * item + initial_resources["offset"] for item in train_dataset]

    trainer = Trainer()
    scaled.set_trainer(trainer)
    scaled.set_initial_resources({"offset": 1})
    there = pickle.loads(cloudpickle.dumps(scaled))
    assert there.is_async()
    assert await there.run([1, 2]) == [4, 7]
    with pytest.raises(TypeError, match="algorithm function scaled has no parameter val_dataset"):
        there.run([1], [2])


@algo
async def of_this_module(train_dataset: int) -> int:
    """Algorithm that refers to itself, which must not make pickle recurse."""
    assert isinstance(of_this_module, FunctionalAlgorithm)
    return train_dataset + 1


async def test_a_decorated_function_of_a_module_is_pickled_by_value() -> None:
    cloudpickle.register_pickle_by_value(
        inspect.getmodule(test_a_decorated_function_of_a_module_is_pickled_by_value)
    )
    try:
        there = pickle.loads(cloudpickle.dumps(of_this_module))
    finally:
        cloudpickle.unregister_pickle_by_value(
            inspect.getmodule(test_a_decorated_function_of_a_module_is_pickled_by_value)
        )
    assert await there.run(1) == 2
    assert await pickle.loads(cloudpickle.dumps(of_this_module)).run(2) == 3
