"""The learner protocol: how the trainer calls whatever trains the model of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import NamedTuple, Protocol

from ray.util.placement_group import PlacementGroup

from raylight.errors import LearnerError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.token_records import RowRecord
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.settings.supervised_settings import SupervisedSettings
from raylight.types import JsonObject
from raylight.weights.protocol import LoraAdapter
from raylight.weights.sender import PublicationSettings


class ModelSettings(NamedTuple):
    """A model of a run with several, as the learners need it."""

    policy: PolicySettings
    adapter: str | None = None
    """Folder of the initial adapter; None for a new one."""


LearnerSettings = PolicySettings | SupervisedSettings | dict[str, ModelSettings]
"""Settings of the trained model, or of each of several by name."""


class Learner(Protocol):
    """A model that is trained: by ranks (`LearnerGroup`), in this process (`LocalLearner`), or not at all
    (`SimulatedLearner`).

    The methods raise a LearnerLostError if the learner was lost, which `restart` repairs, and a LearnerError
    for a failure that would repeat. The defaults are for a learner in the driver's process, which shares
    its folders and weights, or has no weights.
    """

    async def setup(self, model_path: str, settings: LearnerSettings, total_steps: int, seed: int) -> None:
        """Load the model. `restart` uses the arguments again."""
        return None

    async def check_storage(self, folders: Mapping[str, str]) -> None:
        """Check that the learner shares folders with the driver.

        Args:
            folders: folder or URL by the name of its setting.

        Raises:
            ConfigError: it does not share one.
        """
        return None

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the weights with a batch, and return metrics."""
        ...

    async def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """Return sums of a supervised model's figures over a batch, and their count.

        Raises:
            LearnerError: the learner trains policies alone.
        """
        raise LearnerError("this learner does not train on examples; leave learner.kind='ranks'")

    async def row_records(self) -> list[RowRecord]:
        """Return what the last update computed of each row. A row may come several times."""
        return []

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        """Return the log-probs of `ids[1:]` at temperature 1, for a comparison with the engines'; none if the
        learner has no weights.

        Args:
            model: name of one of several models.
        """
        return []

    async def take_snapshot(self, ids: list[int], settings: PublicationSettings) -> list[float] | None:
        """Copy the weights, for publications during updates; return their log-probs as `logprobs` does."""
        return None

    async def publish_weights(self, version: int, token: str, settings: PublicationSettings) -> None:
        """Send the weights to the engine replicas that lack them.

        Args:
            version: number of the weights.
            token: the publication's; empty for replicas that joined after it.

        Raises:
            WeightSyncError: several transfers in a row broke, or the coordinator is gone.
        """
        return None

    async def export_adapter(self, model: str = "") -> tuple[int, LoraAdapter]:
        """Return the current version and the adapter.

        Args:
            model: name of one of several models.

        Raises:
            ConfigError: there is none.
        """
        ...

    async def save(self, folder: str, adapters: Mapping[str, Awaitable[LoraAdapter]] | None = None) -> None:
        """Write the model in Hugging Face format to a folder that the learner can reach; several models each
        to a subfolder.

        Args:
            adapters: references to versions of the adapters by model, in place of the current ones. The name
                of the only model is empty.
        """
        ...

    async def save_state(
        self, url: str, step: int, metadata: JsonObject, keep: int, timeout_s: float
    ) -> None:
        """Copy the training state of a step, and write it in the background, after the last one.

        Args:
            metadata: JSON values that are stored with the state.
            keep: number of states to keep.
            timeout_s: seconds within which the last state must be written.

        Raises:
            CheckpointError, DiskError: the last state could not be written.
        """
        ...

    async def finish_saving(self, timeout_s: float) -> None:
        """Wait until the last training state is written.

        Raises:
            CheckpointError, DiskError: it could not be written, or not within `timeout_s` seconds.
        """
        return None

    async def load_state(self, url: str, step: int, version: int) -> None:
        """Continue from the training state of a step, and number its weights `version`."""
        ...

    async def restart(self, placement: PlacementGroup | None = None) -> None:
        """Start again, in the same or other bundles, with the initial weights.

        Raises:
            LearnerError: the learner is in the driver's process, and is lost only with it.
        """
        raise LearnerError("this learner cannot be restarted; resume the run from its training state")

    def nodes(self) -> Mapping[int, str]:
        """Return the id of the node of each rank; empty for a learner in the driver's process."""
        return {}

    def stop(self) -> None:
        """End the learner, and free what it holds."""
        return None
