"""Losses of the Tinker API, by name: functions of log-probs of shape (tokens,), the targets of all examples
of a pass one after the other, that return the loss of each, same shape. A call's loss is their sum.

Formulas: https://tinker-docs.thinkingmachines.ai/tinker/losses. The functions use tensors' own methods only,
so that this file needs no torch, and requests can be checked where it is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TARGETS = "target_tokens"
RATIO_MASK = "sequence_ratio_mask"
ROWS = "rows"
"""Input that the trainer adds: for each token, the number of its example in the pass, int64."""
Inputs = Mapping[str, "Tensor"]
"""Tensors by name, each of shape (tokens,)."""
TokenLoss = Callable[["Tensor", Inputs, Mapping[str, float]], "Tensor"]
"""Function of log-probs of the targets, shape (tokens,), inputs and settings; returns losses, same shape."""


@dataclass(frozen=True)
class Loss:
    """A loss, and what a request gives for it."""

    function: TokenLoss
    required: tuple[str, ...]
    """Inputs that each datum has, in addition to `target_tokens`."""
    optional: tuple[str, ...] = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    """Defaults of `loss_fn_config`."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return the weighted negative log-probs, shape (tokens,)."""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return -advantage * ratio of the policy to the one that sampled, shape (tokens,)."""
    return _weighted(-_ratio(logprobs, inputs) * inputs["advantages"], inputs)


def ppo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return PPO's clipped surrogate loss (https://arxiv.org/abs/1707.06347), shape (tokens,)."""
    return _surrogate(_ratio(logprobs, inputs), inputs, settings)


def gspo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return the loss of GSPO-token (https://arxiv.org/abs/2507.18071), shape (tokens,): PPO's, with one
    ratio for all tokens of an example, the geometric mean over those that the mask selects. The gradient is
    each token's own."""
    own, rows = logprobs.detach(), inputs[ROWS]
    marked = (inputs[RATIO_MASK] != 0).to(own.dtype)
    zeros = own.new_zeros(int(rows[-1]) + 1)
    sums = zeros.index_add(0, rows, (own - inputs["logprobs"]) * marked)
    means = sums / zeros.index_add(0, rows, marked)
    return _surrogate((means[rows] + logprobs - own).exp(), inputs, settings)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return CISPO's loss (https://arxiv.org/abs/2506.13585), shape (tokens,): its ratio has no gradient."""
    clipped = _clip(_ratio(logprobs, inputs), inputs, settings).detach()
    return _weighted(-clipped * logprobs * inputs["advantages"], inputs)


def dro(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return DRO's loss with a quadratic penalty (https://arxiv.org/abs/2405.19107), shape (tokens,)."""
    distance = (logprobs - inputs["logprobs"]) ** 2
    return _weighted(settings["beta"] / 2 * distance - logprobs * inputs["advantages"], inputs)


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _surrogate(ratio: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Return the lower bound of the clipped and the unclipped objective, as a loss."""
    advantages, clipped = inputs["advantages"], _clip(ratio, inputs, settings)
    return _weighted(-(ratio * advantages).minimum(clipped * advantages), inputs)


def _clip(ratio: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Clip ratios to the thresholds of each token, or the call's."""
    low, high = (inputs.get(name, settings[name]) for name in (LOW, HIGH))
    return ratio.clamp(min=low).clamp(max=high)


def _weighted(losses: Tensor, inputs: Inputs) -> Tensor:
    weights = inputs.get("weights")
    return losses if weights is None else losses * weights


LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
SAMPLED = ("logprobs", "advantages")
CLIPPED = ("weights", LOW, HIGH)
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, SAMPLED, ("weights",)),
    "ppo": Loss(ppo, SAMPLED, CLIPPED, {LOW: 0.8, HIGH: 1.2}),
    "gspo": Loss(gspo, (*SAMPLED, RATIO_MASK), CLIPPED, {LOW: 0.8, HIGH: 1.2}),
    "cispo": Loss(cispo, SAMPLED, CLIPPED, {LOW: 0.0, HIGH: 4.0}),
    "dro": Loss(dro, SAMPLED, ("weights",), {"beta": 0.05}),
}

STABLE_REINFORCE = "stable_reinforce"
SUBSTITUTES = tuple(name for name, loss in LOSSES.items() if loss.required == SAMPLED)
"""Losses that can train requests for `stable_reinforce`: they need the same inputs."""
REFUSED: Mapping[str, str] = {
    STABLE_REINFORCE: (
        "only Tinker's own service defines stable_reinforce; choose another loss, or start the server with "
        "--stable-reinforce ppo, which trains such requests with ppo"
    ),
    "custom": "custom losses are computed by the client; call forward_backward_custom",
}
"""Losses of the SDK that the server does not compute, and the reason."""
