"""Self-play in the training loop: the opponents of every step, even after kills of driver and learners."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_world import START, STEPS, FakeRun, Publications, World, live, mixed, told, weights_of

from raylight.agent.resources import LLM
from raylight.errors import CheckpointError
from raylight.experience.opponents import SelfPlay
from raylight.types import CallKey, Generation
from raylight.weights.protocol import LoraAdapter

EVERY, POOL = 2, 3


class DuelPublications(Publications):
    """Serves the policy's older versions under separate names."""

    names: set[str]

    async def published_adapter(self) -> LoraAdapter:
        return LoraAdapter({"weights": self.engines.weights}, {"w": np.zeros(1, np.float32)})

    async def pin_adapter(self, name: str, version: int, adapter: LoraAdapter) -> None:
        assert name not in self.names, "engines take no name twice"
        self.names.add(name)
        assert adapter.config["weights"] == (self.world.published[version] if version else START)
        self.engines.pinned[name] = (version, adapter.config["weights"])

    async def stop_serving(self, name: str) -> None:
        del self.engines.pinned[name]


class Duel(FakeRun):
    """Rollouts that call an opponent too."""

    async def _open(self) -> None:
        await super()._open()
        opponent = LLM(endpoint="http://engine", model="opponent", traced=True)
        resources = self.endpoints.published.resources | {"opponent": opponent}
        self.endpoints.published = await self.store.add_resources(resources)
        publications = DuelPublications(self.world, self.learners.learner, self.engines)  # type: ignore[arg-type]
        publications.names = set()
        self.learners.publications = publications  # type: ignore[assignment]

    async def _call(self, rollout: Any, turn: int, token: int, model: str) -> None:
        await super()._call(rollout, turn, token, model)
        resources = await self.store.get_resources_by_id(rollout.resources_id)
        name = resources.resources["opponent"].model
        version, _ = self.engines.pinned[name]
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, mixed(name, turn))
        call = Generation(key, name, [9], [token, 1], [-1.0] * 2, [version] * 2, "stop", turn, turn + 1.0)
        await self.store.capture([(key, float(turn))], [(key, call, None)])
        met = rollout.metadata.get("opponent"), version
        assert self.world.met.setdefault(rollout.rollout_id.partition("-")[2], met) == met


def world_of(folder: Path) -> Any:
    folder.mkdir()
    world: Any = World(folder)
    world.run, world.serves_adapter, world.met = Duel, True, {}
    return world


def fight(world: Any, **more: Any) -> list[dict]:
    return asyncio.run(live(world, opponents=SelfPlay(every=EVERY, pool=POOL), **more))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict]]:
    world = world_of(tmp_path_factory.mktemp("self_play") / "a")
    return world, fight(world)


def test_each_step_meets_versions_of_the_pool(undisturbed: tuple[Any, list[dict]]) -> None:
    world, rows = undisturbed
    for name, (step, version) in world.met.items():
        kind, number = name.split("-")[:2]
        if kind == "val":
            assert (step, version) == (None, 0), "validation meets the initial model"
            continue
        assert step == version
        assert step % EVERY == 0
        assert step <= int(number) // 4
    trained = [row for row in rows if row["step"]]
    assert [row["opponents/newest_step"] for row in trained] == [0, 0, 2, 2, 4, 4, 6, 6, 8]
    assert [row["opponents/pool"] for row in trained] == [1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert len({step for step, _ in world.met.values() if step is not None}) > 2
    last = trained[-1]
    assert last["ledger/model/opponent/sampled"] == last["ledger/model/opponent/untrained"] > 0
    assert last["ledger/model/policy/trained"] == last["ledger/trained"] > 0


@pytest.mark.parametrize(
    "kills", [[9, 30, 50], *(pytest.param(ends, marks=pytest.mark.slow) for ends in [[5, 17], [25]])]
)
def test_a_killed_driver_goes_on_with_the_same_opponents(
    kills: list[int], undisturbed: tuple[Any, list[dict]], tmp_path: Path
) -> None:
    expected, rows = undisturbed
    world = world_of(tmp_path / "a")
    for kill in kills:
        fight(world, die_after=kill)
    assert told(fight(world)) == told(rows)
    assert world.met == expected.met
    assert weights_of(world) == weights_of(expected)


@pytest.mark.parametrize("faults", [pytest.param({1: 1}, marks=pytest.mark.slow), {4: 1, 7: 1}])
def test_lost_learners_go_on_with_the_same_opponents(
    faults: dict[int, int], undisturbed: tuple[Any, list[dict]], tmp_path: Path
) -> None:
    expected, rows = undisturbed
    world = world_of(tmp_path / "a")
    world.faults = dict(faults)
    assert told(fight(world)) == told(rows)
    assert world.met == expected.met
    assert weights_of(world) == weights_of(expected)


def test_an_opponent_that_is_missing_is_an_error(tmp_path: Path) -> None:
    world = world_of(tmp_path / "a")
    world.steps = STEPS
    fight(world, die_after=40)
    for file in (world.folder / "opponents" / "step-0").iterdir():
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"the opponent of step 0 is missing.*copy the folder opponents"
    ):
        fight(world)
