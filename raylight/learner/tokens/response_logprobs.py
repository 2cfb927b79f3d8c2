"""Log-probs and entropies of sampled tokens. Prompts and observations are skipped, because nothing reads
their log-probs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from raylight.errors import ConfigError
from raylight.learner.tokens.sampling_replay import SamplingReplay
from raylight.learner.tokens.token_logprobs import (
    TokenDivergence,
    chunk_tokens,
    squared_probs,
    token_logprobs,
)


@dataclass(frozen=True, eq=False)
class TargetTokens:
    """The sampled tokens of a micro-batch, of which a model computes log-probs."""

    positions: torch.Tensor
    """True where the model predicts one, in the shape of its input ids, in host memory."""
    targets: torch.Tensor
    """Ids of the tokens, row after row, shape (sampled tokens,)."""
    temperatures: torch.Tensor | None
    """Sampling temperatures of the tokens, float32, shape (sampled tokens,); None if all are 1."""
    entropy: bool
    """Compute the entropies of the tokens' distributions too."""
    entropy_grad: bool
    """Compute the gradient of the entropies."""
    squares: bool = False
    """Compute the sums of squared probabilities of the tokens' distributions too."""
    router_logits: bool = False
    """Return the logits of the routers too."""
    replay: SamplingReplay | None = None
    """Penalties and candidates of the tokens; None if they have neither."""
    divergence: TokenDivergence | None = None
    """Computes the divergences of the tokens' distributions from a teacher's too; None: not wanted."""
    hidden: bool = False
    """Return the hidden states that predict the tokens, and nothing else."""


class LogprobHead:
    """Makes a causal language model return log-probs of sampled tokens instead of logits.

    Without sampled tokens the model returns its own output, so that an engine can sample from it too.

    The model's own forward pass runs in two parts. The transformer runs once. The rest, the output layer and
    what the architecture does around it (a soft cap, a scale), runs chunk by chunk, within a single call of
    the output layer, so that FSDP gathers its weights once.

    Args:
        model: language model of transformers, with or without adapters, before FSDP wraps it.
        chunk: tokens whose logits are in memory at a time; None for the fastest number.

    Raises:
        ConfigError: the model's transformer or output layer is not a direct child of the model.
    """

    def __init__(self, model: PreTrainedModel, chunk: int | None = None) -> None:
        self._model, self._chunk = model, chunk
        self._own_forward = model.forward
        head = model.get_output_embeddings()
        names = {id(child): name for name, child in model.named_children()}
        # Llama 4 gives its transformer another name than its prefix
        transformer = getattr(model, "model", None) if model.base_model is model else model.base_model
        if id(transformer) not in names or id(head) not in names:
            raise ConfigError(
                f"{type(model).__name__} cannot be trained: its transformer and its output layer are not "
                "direct parts of the model; choose a model with the layout of transformers' causal language "
                "models"
            )
        self._base_name, self._head_name = names[id(transformer)], names[id(head)]
        self._head, self._head_forward = head, head.forward
        self._vocabulary = model.config.get_text_config().vocab_size
        model.forward = self._forward
        head.forward = self._chunked

    @property
    def layer(self) -> torch.nn.Module:
        """The model's output layer."""
        return self._head

    def _forward(self, *args: object, sampled: TargetTokens | None = None, **inputs: object) -> object:
        """Return flat tensors `log_probs`, and `entropy`, `sum_pi_squared` and `divergence` if they are
        wanted, of the sampled tokens, and `router_logits` of all tokens, shape (layers, tokens, experts); or
        only `hidden`."""
        if sampled is None:
            return self._own_forward(*args, **inputs)
        given = {name: value for name, value in inputs.items() if value is not None}
        if sampled.router_logits:
            given["output_router_logits"] = True
        output = getattr(self._model, self._base_name)(**given)
        hidden = output[0]
        chosen = sampled.positions.flatten().nonzero()[:, 0].to(hidden.device)
        if sampled.hidden:
            return {"hidden": hidden.flatten(0, 1)[chosen]}
        figures, squares = self._head(hidden.flatten(0, 1)[chosen], sampled)
        found = {
            "log_probs": figures.logprobs,
            "entropy": figures.entropies,
            "sum_pi_squared": squares,
            "divergence": figures.divergences,
        }
        if sampled.router_logits:
            found["router_logits"] = torch.stack(output.router_logits)
        return {name: values for name, values in found.items() if values is not None}

    def _chunked(self, hidden: torch.Tensor, sampled: TargetTokens | None = None) -> object:
        if sampled is None:
            return self._head_forward(hidden)
        chunk = self._chunk or chunk_tokens(self._vocabulary, hidden.device)
        figures = token_logprobs(
            self.logits,
            self._head.parameters(),
            hidden,
            sampled.targets,
            sampled.temperatures,
            chunk=chunk,
            entropy=sampled.entropy,
            entropy_grad=sampled.entropy_grad,
            replay=sampled.replay,
            divergence=sampled.divergence,
        )
        squares = None
        if sampled.squares:
            squares = squared_probs(
                self.logits, hidden, sampled.temperatures, chunk=chunk, replay=sampled.replay
            )
        return figures, squares

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's own logits, (tokens, vocabulary), of `hidden`, (tokens, hidden size)."""
        output = _TransformerOutput(hidden[None])
        with self._replaced({self._base_name: lambda *_, **__: output, self._head_name: self._head_forward}):
            return self._own_forward(inputs_embeds=hidden[None], use_cache=False).logits[0]

    @contextlib.contextmanager
    def _replaced(self, functions: dict[str, Callable[..., object]]) -> Iterator[None]:
        """Replace the calls of children of the model by functions."""
        modules: dict[str, Any] = self._model._modules
        own = {name: modules[name] for name in functions}
        modules.update({name: _ReplacedModule(own[name], call) for name, call in functions.items()})
        try:
            yield
        finally:
            modules.update(own)


class _ReplacedModule:
    """Module whose attributes are read, and which is not called: a function is called in its place.

    The function also replaces its submodules: OPT calls the decoder of its transformer.
    """

    def __init__(self, module: torch.nn.Module, call: Callable[..., object]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        found = getattr(self._module, name)
        return _ReplacedModule(found, self._call) if isinstance(found, torch.nn.Module) else found


class _TransformerOutput:
    """Output of a transformer that has nothing but the last hidden state."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
