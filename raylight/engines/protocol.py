"""The engine protocol: sampling over an OpenAI-compatible application, weight updates, log-probs, sleep.

An engine lives in one replica. Its application serves `/v1/chat/completions`, `/v1/completions`,
`/v1/models`, `/tokenize` and `/detokenize`, with and without streaming; requests in other dialects are
translated into these before they reach it.

Laws:

- While it samples for an agent, an engine records each token in the current `CaptureContext`
  (`capture_context.py`). An engine that does not is served, but its calls have no tokens and cannot be
  trained on.
- An engine samples at most `CaptureContext.max_tokens` tokens for a choice of the current context, if that is
  set, and ends it with the finish reason "length".
- Every sampled token is produced by exactly one weight version.
- A version of weights or of an adapter is loaded at most once.
- An update of the weights has the phases of vLLM's weight transfer. Between `start_weight_update` and
  `finish_weight_update` nothing is sampled; requests wait. After an update that was broken off, they wait
  until the next one is complete.

An engine of the user's own is chosen by its dotted name, `EngineConfig(kind="package.module:Engine")`: a
class (or a function that returns an instance) which is called as `Engine(settings, **args)` in the replica's
process, with `EngineSettings` and the entries of `EngineConfig.args`. A class without weights to update needs
only a constructor and `app`, see `InferenceOnlyEngine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp

from raylight.config import EngineConfig
from raylight.errors import WeightSyncError
from raylight.types import Tokenizer, TopLogprobs
from raylight.weights.protocol import EngineLoad as EngineLoad
from raylight.weights.protocol import LoraAdapter as LoraAdapter
from raylight.weights.protocol import SyncedEngine
from raylight.weights.protocol import UpdateMode as UpdateMode

if TYPE_CHECKING:
    from raylight.images.model_inputs import ModelImages

PROMPT_IDS = "prompt_token_ids"
"""Key in a chat request's `kv_transfer_params` for a prompt given as token ids, as in vLLM. The engine
samples from exactly these ids and renders no chat template."""


@dataclass(frozen=True)
class EngineSettings:
    """Constructor argument of an engine.

    Attributes:
        model_path: local folder of the model; empty for an engine whose model is not local.
        model: name under which the model is served.
        config: the run's engine settings (dtype, limits, url, ...).
        seed: seed for requests that set no seed.
        device: torch device of the replica, "cuda" or "cpu".
    """

    model_path: str
    model: str
    config: EngineConfig
    seed: int = 0
    device: str = "cpu"


class Engine(SyncedEngine, Protocol):
    """A model that samples."""

    model: str
    """Name under which the model is served."""
    tokenizer: Tokenizer | None = None
    """A Hugging Face tokenizer; None if the model's tokens are not known (an upstream model)."""
    max_model_len: int | None = None
    """Longest prompt plus response, in tokens; None if not known."""
    images: ModelImages | None = None
    """Conversion of images; None, or no such attribute, if the model takes none."""

    async def app(self) -> ASGIApp:
        """Return the ASGI application. Called once, when the engine is ready."""
        ...

    async def top_logprobs(self, ids: list[int], k: int, temperature: float = 1.0) -> TopLogprobs:
        """Return the k most probable tokens in the place of each of `ids[1:]`, given the ids before it.

        Args:
            temperature: sampling temperature of the distribution, above 0.

        Raises:
            WeightSyncError: the engine cannot compute them.
        """
        raise WeightSyncError(self.not_trainable)

    def load(self) -> EngineLoad:
        """Return the current load. Called often, so it must be cheap."""
        return EngineLoad()

    async def check_health(self) -> None:
        """Raise if the engine can no longer serve; the replica is then replaced."""
        return None

    def close(self) -> None:
        """Stop computing. Requests in flight, and later ones, end with status 503."""
        return None


class InferenceOnlyEngine(Engine):
    """Base of engines with fixed weights: calls are recorded, the model cannot be trained.

    A subclass defines `app`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.model = settings.model
