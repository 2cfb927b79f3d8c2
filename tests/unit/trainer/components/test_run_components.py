"""A run watches its components, and stops what it started."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest
from run_settings import make_settings, policy_settings
from unit_helpers import within

from raylight.config import EngineConfig, LearnerConfig, LoraConfig
from raylight.errors import ConfigError, RunnerLostError, ServingLostError
from raylight.serving.deploy.deployment import Deployment
from raylight.trainer.components.run_components import PolicyComponents, RunComponents
from raylight.trainer.ray_session import cluster_monitor
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator

LOST = RunnerLostError("runner-0 died")


class Watched:
    """A component that fails when the run works, if it has an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ended = error, False

    def watches(self) -> list[Coroutine[Any, Any, object]]:
        return [self.watch()]

    async def watch(self) -> None:
        try:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.ended = True

    async def counts(self) -> dict[str, int]:
        return {f"errors_{self.error}": 1}


class FakeRun(RunComponents):
    """A run of the given components."""

    def __init__(self, *components: Any, fails: bool = False) -> None:
        super().__init__(make_settings(), lambda text: None, owns_cluster=True)
        self._components, self._fails = list(components), fails
        self.stopped: list[str] = []

    async def _open(self) -> None:
        for name in ("store", "runners"):
            self._stack.callback(self.stopped.append, name)
        if self._fails:
            raise LOST


async def endless() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    await asyncio.sleep(0)
    raise ServingLostError("away for too long")


async def answer() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("errors", "work", "expected"),
    [
        ([None], answer, None),
        ([None, LOST], endless, LOST),
        ([None], fail, ServingLostError("away for too long")),
        ([LOST, ServingLostError("away")], endless, LOST),
        ([], fail, ServingLostError("away for too long")),
    ],
)
async def test_the_work_ends_with_its_own_error_or_with_that_of_a_component(
    errors: list[Any], work: Callable[[], Awaitable[None]], expected: Exception | None
) -> None:
    components = [Watched(error) for error in errors]
    ending: Exception | None = None
    async with within(), FakeRun(*components) as run:
        try:
            async with run.watched():
                await work()
        except (RunnerLostError, ServingLostError) as error:
            ending = error
        await asyncio.sleep(0)  # the task itself is not cancelled any more
        assert len(await run.counts()) == len(set(errors))
    assert (type(ending), str(ending)) == (type(expected), str(expected))
    assert all(component.ended for component in components)
    assert run.stopped == ["runners", "store"]


@pytest.mark.parametrize("turns", range(6))
async def test_work_and_a_component_that_fail_together_raise_an_error(turns: int) -> None:
    """Neither is taken for a cancellation, at any moment around the component's failure."""
    task = asyncio.current_task()
    assert task is not None

    async def work(run: FakeRun) -> None:
        async with run.watched():
            for _ in range(turns):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            raise ServingLostError("away")

    async with within(), FakeRun(Watched(LOST)) as run:
        with pytest.raises((RunnerLostError, ServingLostError)):
            await work(run)
        await asyncio.sleep(0)
    assert not task.cancelling()


async def test_a_cancellation_from_outside_stays_one() -> None:
    component, waiting = Watched(), asyncio.Event()

    async def work() -> None:
        async with FakeRun(component) as run, run.watched():
            waiting.set()
            await endless()

    task = asyncio.create_task(work())
    async with within():
        await waiting.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert component.ended


async def test_what_was_started_is_stopped_if_another_component_does_not_start() -> None:
    run = FakeRun(fails=True)
    with pytest.raises(RunnerLostError):
        await run.__aenter__()
    assert run.stopped == ["runners", "store"]


async def test_nothing_is_stopped_on_a_lost_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeRun() as run:
        monkeypatch.setattr(cluster_monitor, "is_cluster_lost", lambda: True)
    assert run.stopped == []


@pytest.mark.parametrize("lora", [None, LoraConfig()], ids=["weights", "adapter"])
async def test_replicas_that_load_adapters_need_no_transport_of_weights(
    lora: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reach(deployment: Deployment, n: int, timeout: float) -> None: ...

    monkeypatch.setattr(Deployment, "_reach", reach)
    engine = EngineConfig(kind="vllm", num_gpus=0.4, weight_transfer="ipc")
    learner = LearnerConfig(n=2, num_gpus=0.6, lora=lora)
    settings = policy_settings("model", engine, learner)
    run = PolicyComponents(settings, lambda text: None, True)
    run.store = cast(Any, None)
    model = run._make_model(settings)
    model._stack, model.coordinator = contextlib.AsyncExitStack(), CoordinatorClient(ReplicaCoordinator())
    model.prepare(seed=0)
    async with within():
        await model.deployment.resize(2)
        with contextlib.nullcontext() if lora else pytest.raises(ConfigError, match="does not reach 3"):
            await model.deployment.resize(3)
