"""What every engine offers, whatever computes behind it: an OpenAI-compatible application, weights, log-probs, sleep.

An engine lives in one replica. Its application answers `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/tokenize` and
`/detokenize`, streaming or not; what else agents speak is translated into these before it comes here. While it samples for an
agent it tells the current `CaptureContext` the tokens (see `exchange.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from starlette.types import ASGIApp

UpdateMode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight when new weights come: they go on with them (and their tokens' versions tell), the weights
wait for their end, or they end at once with the finish reason "abort"."""

PROMPT_IDS = "prompt_token_ids"
"""Key in a chat request's `kv_transfer_params` under which the gateway hands over a prompt as tokens, as in vLLM: the engine then
samples from exactly these, and renders no template."""


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter as peft saves it.

    Attributes:
        config: the content of `adapter_config.json`.
        weights: name to array, as in `adapter_model.safetensors`.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, Any]


class Engine(Protocol):
    """A model that samples."""

    kind: str
    """The name under which it is chosen: "transformers", "vllm" or "upstream"."""
    model: str
    """The name under which the model is served."""
    tokenizer: Any
    """A Hugging Face tokenizer; None where tokens are not known (an upstream model)."""
    max_model_len: int | None

    async def app(self) -> ASGIApp:
        """The application; called once, when the engine is ready."""
        ...

    async def load_weights(self, version: int, weights: Mapping[str, Any], mode: UpdateMode = "keep") -> None:
        """Take new weights: name to array in full precision, tied output layers included.

        Raises:
            WeightSyncError: a tensor is missing, unknown or of another shape; the engine has no weights of its own.
        """
        ...

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        """Serve an adapter as the model `name`, in place of its last version if it had one. Requests in flight end with the version
        that they began with under "keep"; a version is never loaded twice.

        Raises:
            WeightSyncError: the adapter does not fit the model, or the engine has no adapters.
        """
        ...

    async def drop_adapter(self, name: str) -> None:
        """Serve the model `name` no longer; unknown names are ignored."""
        ...

    async def logprobs(self, ids: list[int], adapter: str | None = None) -> list[float]:
        """Log-probabilities at temperature 1 of `ids[1:]`, each given those before it, with the current weights.

        Raises:
            WeightSyncError: the engine cannot tell.
        """
        ...

    async def sleep(self, level: int = 1) -> str | None:
        """Free the device's memory until `wake`; requests wait meanwhile. Returns why nothing was freed, where that is so."""
        ...

    async def wake(self) -> None: ...

    async def check_health(self) -> None:
        """Raises if the engine can serve no more."""
        ...

    def close(self) -> None:
        """Stop computing; requests in flight, and any that come later, end with status 503."""
        ...
