"""Routes of a mixture of experts, recorded where tokens are sampled and replayed where they are trained.

A router's choice is a `torch.topk` over its scores. While a layer of experts computes, that call is recorded,
or answered with the recorded choice and the scores of the chosen experts, from which the layer computes
weights as always: gradients reach the router. This works for each architecture whose routers call topk once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from raylight.errors import ConfigError
from raylight.types import RouteArray

TOPK = (torch.topk, torch.Tensor.topk)


class ExpertRoutes:
    """Records and replays which experts the tokens of a forward pass go to.

    Router replay follows R3 (https://arxiv.org/abs/2510.11370).

    Args:
        module: a model of transformers, whose layers of experts are wrapped in place.

    Raises:
        ConfigError: it has no layers of packed experts.
    """

    def __init__(self, module: Any) -> None:
        blocks = expert_layers(module)
        if not blocks:
            raise ConfigError(
                f"{type(module).__name__} has no layers of packed experts, whose routes could be replayed; "
                "set learner.router_replay=False"
            )
        self.layers = len(blocks)
        """Number of layers of experts."""
        self.top_k: int = module.config.get_text_config().num_experts_per_tok
        self._dtype = route_dtype(max(block.experts.num_experts for block in blocks))
        self._recorded: list[torch.Tensor] | None = None
        self._replayed: tuple[torch.Tensor, torch.Tensor] | None = None
        for layer, block in enumerate(blocks):
            block.forward = functools.partial(self._forward, block.forward, layer, block.experts.num_experts)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], RouteArray]]:
        """Record the routes of a forward pass within the context.

        Yields:
            A function that returns them after the pass, of shape (tokens of the pass, layers, experts of a
            token).
        """
        recorded = self._recorded = []
        try:
            yield lambda: torch.stack(recorded, 1).cpu().numpy().astype(self._dtype)
        finally:
            self._recorded = None

    def replay(self, found: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Replay routes in the passes from now on, and in their recomputation.

        Args:
            found: the routes, shape (tokens of the pass, layers, experts of a token), and True for the tokens
                that have some, shape (tokens of the pass,); the routers choose for the others. None: for all.

        Raises:
            ConfigError: they belong to another model.
        """
        if found is None:
            self._replayed = None
            return
        routes, known = found
        if routes.shape[1:] != (self.layers, self.top_k):
            raise ConfigError(
                f"the recorded routes have {tuple(routes.shape[1:])} layers and experts for each token, and "
                f"the learner's model {(self.layers, self.top_k)}; train the model that the engine serves"
            )
        self._replayed = routes.long(), known

    def _forward(
        self, forward: Callable[..., object], layer: int, experts: int, *args: object, **inputs: object
    ) -> Any:
        if self._recorded is None and self._replayed is None:
            return forward(*args, **inputs)
        with _TopK(functools.partial(self._choose, layer), experts, self.top_k) as topk:
            output = forward(*args, **inputs)
        if topk.calls != 1:
            raise ConfigError(
                f"the routers of this model choose experts by {topk.calls} calls of topk, so that their "
                "routes are not known; set learner.router_replay=False"
            )
        return output

    def _choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return the experts that tokens go to.

        Args:
            own: the router's own choice, shape (tokens, experts of a token).
        """
        if self._recorded is not None:
            self._recorded.append(own)
        if self._replayed is None:
            return own
        routes, known = self._replayed
        return torch.where(known[:, None], routes[:, layer], own)


class _TopK(TorchFunctionMode):
    """Mode in which a router's topk returns the experts that a function chooses."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor], experts: int, top_k: int) -> None:
        super().__init__()
        self._choose, self._experts, self._top_k = choose, experts, top_k
        self.calls = 0

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK or found[1].shape != (len(args[0]), self._top_k) or args[0].dim() != 2:
            return found
        scores: torch.Tensor = args[0]
        if scores.shape[1] != self._experts:
            return found
        self.calls += 1
        chosen = self._choose(found[1])
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def expert_layers(module: Any) -> list[Any]:
    """Return the layers of packed experts of a model of transformers, each with its router."""
    return [part for part in module.modules() if hasattr(getattr(part, "experts", None), "num_experts")]


def route_bytes(module: Any, layers: int | None = None) -> int:
    """Return the bytes of the routes of a token through so many layers, by default those with experts.

    0 for a model without experts.
    """
    blocks = expert_layers(module)
    if not blocks:
        return 0
    dtype = route_dtype(max(block.experts.num_experts for block in blocks))
    top_k: int = module.config.get_text_config().num_experts_per_tok
    return (layers or len(blocks)) * top_k * np.dtype(dtype).itemsize


def route_dtype(experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the type of the ids of so many experts."""
    return np.uint8 if experts <= 256 else np.uint16
