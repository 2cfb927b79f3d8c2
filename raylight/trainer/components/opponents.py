"""The opponents of a run with self-play: older versions of the policy's adapter that the engines serve."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raylight._utils.files import atomic_folder
from raylight.config import MODEL_NAME
from raylight.errors import CheckpointError
from raylight.experience.opponents import OPPONENT, OpponentPool, SelfPlay
from raylight.experience.trajectories.reward_rules import effective_reward
from raylight.trainer.components.publication import Publications
from raylight.types import FinishedRollout, JsonObject
from raylight.weights.peft_files import missing_files, read_adapter, write_adapter
from raylight.weights.protocol import LoraAdapter

FOLDER = "opponents"
"""Folder of the opponents' adapters in the run directory."""
INITIAL = 0
"""Step of the opponent of validation rollouts, which stays the same."""


class ServedOpponents:
    """The pool of opponents, whose adapters are in the run directory and served by the engines.

    Args:
        seed: of the draws.
        folder: the run directory.
    """

    def __init__(self, settings: SelfPlay, seed: int, publications: Publications, folder: Path) -> None:
        self._settings, self._publications, self._folder = settings, publications, folder / FOLDER
        self.pool = OpponentPool(settings, seed)
        self._served: dict[int, str] = {}
        """Name under which each version is served, by its step."""
        self._releases = 0

    async def restore(self, state: JsonObject) -> None:
        """Continue from a state, and serve its opponents.

        Raises:
            CheckpointError: the run directory lacks an opponent.
            WeightSyncError: not enough replicas served one.
        """
        self.pool.load_state_dict(state)
        if not self.pool.opponents:  # the published adapter is the initial one
            await self.add(INITIAL, 0)
        for step, version in {INITIAL: 0, **{one.step: one.version for one in self.pool.opponents}}.items():
            if step not in self._served:
                await self._serve(step, version, self._read(step))

    async def add(self, step: int, version: int, is_repeated: bool = False) -> None:
        """Make the published policy after a step an opponent.

        Args:
            version: number of its weights.
            is_repeated: the step is taken again, and the run directory has the adapter.

        Raises:
            CheckpointError: it lacks the adapter.
            WeightSyncError: not enough replicas served it.
        """
        if step not in self._served:
            if is_repeated:
                adapter = self._read(step)
            else:
                adapter = await self._publications.published_adapter()
                self._write(step, adapter)
            await self._serve(step, version, adapter)
        left = self.pool.add(step, version)
        if left is not None and left != INITIAL:
            self._releases += 1
            await self._publications.stop_serving(self._served.pop(left))

    @property
    def initial(self) -> str:
        """Name under which the initial model is served."""
        return self._served[INITIAL]

    @property
    def names(self) -> dict[int, str]:
        """Names of the served versions, by step."""
        return dict(self._served)

    def record(self, rollouts: Iterable[FinishedRollout], failure_reward: float | None) -> dict[str, float]:
        """Change the ratings by a step's rollouts; return metrics."""
        results = [
            (item.rollout.metadata[OPPONENT], reward)
            for item in rollouts
            if OPPONENT in item.rollout.metadata
            and (reward := effective_reward(item, failure_reward)) is not None
        ]
        self.pool.record(results)
        scores = [self._settings.score(reward) for _, reward in results]
        won = {"opponents/score": sum(scores) / len(scores)} if scores else {}
        return won | self.pool.metrics()

    async def _serve(self, step: int, version: int, adapter: LoraAdapter) -> None:
        again = f"-{self._releases}" if self._releases else ""  # engines take no version of a name twice
        name = f"{MODEL_NAME}@opponent-{step}{again}"
        await self._publications.pin_adapter(name, version, adapter)
        self._served[step] = name

    def _write(self, step: int, adapter: LoraAdapter) -> None:
        with atomic_folder(self._path(step)) as folder:
            write_adapter(folder, adapter)

    def _read(self, step: int) -> LoraAdapter:
        path = self._path(step)
        if missing := missing_files(path):
            raise CheckpointError(
                f"the opponent of step {step} is missing: there is no {path / missing[0]}; copy the folder "
                f"{FOLDER}/ of the run that is resumed into this run directory"
            )
        return read_adapter(path)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}"
