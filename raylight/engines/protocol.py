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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from starlette.types import ASGIApp

from raylight.config import EngineConfig
from raylight.errors import WeightSyncError

UpdateMode = Literal["keep", "wait", "abort"]
"""Handling of requests in flight during a weight update: "keep" continues them with the new weights (each
token records its own version), "wait" delays the update until they have finished, "abort" ends them
immediately with the finish reason "abort"."""

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
        seed: seed for requests without a seed of their own.
        device: torch device of the replica, "cuda" or "cpu".
    """

    model_path: str
    model: str
    config: EngineConfig
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter as peft saves it.

    Attributes:
        config: the content of `adapter_config.json`.
        weights: name to array, as in `adapter_model.safetensors`.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, Any]


@dataclass(frozen=True)
class EngineLoad:
    """Requests and cache use of one engine at one moment. The defaults stand for an engine without a cache of
    its own.

    Attributes:
        kv_use: share of the key-value cache that is in use, 0 to 1.
        running: requests that are being sampled.
        waiting: requests that the engine has accepted and not begun, or has preempted.
        preemptions: times since the engine's start that a request lost its place in the cache to others.
        capacity: tokens that the key-value cache holds; 0 if not known.
        paused: True while the engine samples nothing because its weights change or it sleeps.
        idle_s: seconds since the engine's start in which it had no request. The replica measures them.
    """

    kv_use: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    capacity: int = 0
    paused: bool = False
    idle_s: float = 0.0


class Engine(Protocol):
    """A model that samples."""

    model: str
    """Name under which the model is served."""
    tokenizer: Any
    """A Hugging Face tokenizer; None if the model's tokens are not known (an upstream model)."""
    max_model_len: int | None
    """Longest prompt plus response, in tokens; None if not known."""
    workers: int
    """Number of processes that receive weights."""

    async def app(self) -> ASGIApp:
        """Return the ASGI application. Called once, when the engine is ready."""
        ...

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        """Join the group of the sender and all engines, and leave an earlier one.

        Args:
            info: what the transport needs; the first worker's rank is `rank_offset`.

        Raises:
            ConnectionError: the other processes did not come.
            WeightSyncError: the engine has no weights of its own.
        """
        ...

    async def start_weight_update(self, mode: UpdateMode = "keep") -> None:
        """Stop sampling, and prepare for new weights."""
        ...

    async def update_weights(self, info: Any) -> None:
        """Receive weights.

        Args:
            info: what the transport needs, such as the names and shapes of the tensors.

        Raises:
            ConnectionError: a process that takes part in the transfer was lost.
            WeightSyncError: a tensor is missing, unknown or of another shape.
        """
        ...

    async def finish_weight_update(self, version: int) -> None:
        """Sample with the new weights, which are numbered `version`, from now on."""
        ...

    async def abort_weight_update(self) -> None:
        """Leave the transfer; an update that has begun to load weights stays incomplete.

        Sampling continues if no weights were loaded. Without effect if no transfer is open.
        """
        ...

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        """Serve an adapter as the model `name`, replacing its previous version.

        Under the name of the model itself, requests for the model are served with the adapter from then on.
        Under "keep", requests in flight finish with the version that they started with.

        Raises:
            WeightSyncError: the adapter does not fit the model, or the engine supports no adapters.
        """
        ...

    async def drop_adapter(self, name: str) -> None:
        """Stop serving the model `name`; unknown names are ignored."""
        ...

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-probs of `ids[1:]`, each given the ids before it.

        Args:
            temperature: sampling temperature of the distribution, above 0.

        Raises:
            WeightSyncError: the engine cannot compute them.
        """
        ...

    async def sleep(self, level: int = 1) -> str | None:
        """Free the device's memory until `wake`; requests wait meanwhile.

        Returns the reason if nothing was freed, else None.
        """
        ...

    async def wake(self) -> None:
        """Resume after `sleep`."""
        ...

    def load(self) -> EngineLoad:
        """Return the current load. Called often, so it must be cheap."""
        ...

    async def check_health(self) -> None:
        """Raise if the engine can no longer serve; the replica is then replaced."""
        ...

    def close(self) -> None:
        """Stop computing. Requests in flight, and later ones, end with status 503."""
        ...


class InferenceOnlyEngine:
    """Base of engines with fixed weights: calls are recorded, the model cannot be trained.

    A subclass defines `app`.
    """

    tokenizer: Any = None
    max_model_len: int | None = None
    workers: int = 1
    not_trainable = "this engine's model cannot be trained: the engine takes no weights"
    """Error message for every attempt to change or probe the weights."""

    def __init__(self, settings: EngineSettings) -> None:
        self.model = settings.model

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        raise WeightSyncError(self.not_trainable)

    async def start_weight_update(self, mode: UpdateMode = "keep") -> None:
        raise WeightSyncError(self.not_trainable)

    async def update_weights(self, info: Any) -> None:
        raise WeightSyncError(self.not_trainable)

    async def finish_weight_update(self, version: int) -> None:
        raise WeightSyncError(self.not_trainable)

    async def abort_weight_update(self) -> None:
        """Do nothing: no update can begin."""

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        raise WeightSyncError(self.not_trainable)

    async def drop_adapter(self, name: str) -> None:
        """Do nothing: no adapter can be loaded."""

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        raise WeightSyncError(self.not_trainable)

    async def sleep(self, level: int = 1) -> str | None:
        return "the engine holds no weights in this process"

    async def wake(self) -> None:
        """Do nothing: the engine never sleeps."""

    def load(self) -> EngineLoad:
        """Return an unknown load."""
        return EngineLoad()

    async def check_health(self) -> None:
        """Always healthy."""

    def close(self) -> None:
        """Do nothing: the engine has no resources."""
