"""Settings of a server of the Tinker API."""

from __future__ import annotations

from dataclasses import dataclass

from raylight.http.errors import RequestError
from raylight.tinker.tinker_losses import REFUSED, STABLE_REINFORCE


@dataclass(frozen=True)
class TinkerSettings:
    """Settings of the server's parts.

    Attributes:
        base_model: name of the model that clients ask for, and of its tokenizer, which they load.
        vocabulary: number of the model's tokens.
        max_model_len: longest prompt and response together, and longest example, in tokens.
        max_rank: highest rank of an adapter.
        max_models: models that may be in training at a time.
        max_waiting: training requests of a model that may wait.
        max_samples: responses that may wait or be sampled at a time.
        kept_samplers: weights without a name that are kept for each model, for sampling.
        lease_s: seconds without a heartbeat after which a session ends.
        stable_reinforce: loss that trains requests for `stable_reinforce`; None: they are rejected.
    """

    base_model: str
    vocabulary: int
    max_model_len: int
    max_rank: int = 128
    max_models: int = 8
    max_waiting: int = 64
    max_samples: int = 4096
    kept_samplers: int = 8
    lease_s: float = 300.0
    stable_reinforce: str | None = None

    def check_base_model(self, name: str) -> None:
        """Check that a client asks for this model.

        Raises:
            RequestError: it asks for another one.
        """
        if name != self.base_model:
            raise RequestError(
                f"base_model: this server has no model {name!r:.200}; it has {self.base_model!r}"
            )

    def resolve_loss(self, name: str) -> str:
        return (self.stable_reinforce or name) if name == STABLE_REINFORCE else name

    def check_stability_info(self) -> None:
        """Check that requests for `stable_reinforce` are trained, for which clients ask to record stability
        information. No loss here reads it.

        Raises:
            RequestError: they would be rejected.
        """
        if self.stable_reinforce is None:
            raise RequestError(f"record_stability_info: {REFUSED[STABLE_REINFORCE]}")
