"""Training examples of a request, and the check of all that a loss reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raylight.http.errors import RequestError
from raylight.tinker.tinker_losses import LOSSES, RATIO_MASK, REFUSED, TARGETS


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence, with inputs of the loss for each of its tokens.

    Attributes:
        tokens: token ids, int64, shape (tokens,).
        inputs: `target_tokens` (int64: the token that each position predicts) and the other inputs (float32)
            by name, each of the same shape.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """Checked examples of a forward pass, and their loss with its complete settings."""

    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float]


def check_batch(
    data: Sequence[Datum], loss: str, settings: Mapping[str, float], vocabulary: int, max_tokens: int
) -> Batch:
    """Return a batch whose every input fits its loss and the model.

    Args:
        settings: `loss_fn_config` of the request.
        vocabulary: number of the model's tokens.
        max_tokens: length of the longest sequence.

    Raises:
        RequestError: the loss is unknown, or an input is missing, unknown, of another length than the tokens,
            not finite, or out of the vocabulary.
    """
    if reason := REFUSED.get(loss):
        raise RequestError(f"loss_fn: {reason}")
    known = LOSSES.get(loss)
    if known is None:
        raise RequestError(f"loss_fn: there is no loss {loss!r:.80}; there are {', '.join(LOSSES)}")
    if unknown := sorted(settings.keys() - known.settings.keys()):
        has = f"it has {', '.join(known.settings)}" if known.settings else "it has none"
        raise RequestError(f"loss_fn_config: {loss} has no setting {unknown[0]!r:.80}; {has}")
    if infinite := [name for name, value in settings.items() if not math.isfinite(value)]:
        raise RequestError(f"loss_fn_config: {infinite[0]} is not finite")
    if not data:
        raise RequestError("data: there is no datum; send at least one")
    for i, datum in enumerate(data):
        _check_datum(f"data[{i}]", datum, loss, vocabulary, max_tokens)
        if unlike := sorted(datum.inputs.keys() ^ data[0].inputs.keys()):
            raise RequestError(
                f"data[{i}].loss_fn_inputs: {unlike[0]} is in only one of this datum and data[0]; give all "
                "data the same inputs"
            )
    return Batch(data, loss, {**known.settings, **settings})


def check_tokens(place: str, tokens: np.ndarray, vocabulary: int, max_tokens: int) -> None:
    """Check the number of token ids, shape (tokens,), and their range.

    Raises:
        RequestError: there is none, or there are too many, or one is out of the vocabulary.
    """
    if not 1 <= len(tokens) <= max_tokens:
        raise RequestError(f"{place}: {len(tokens)} tokens, but this server takes 1 to {max_tokens}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        raise RequestError(
            f"{place}: {wrong} is not a token id; the model has those from 0 to {vocabulary - 1}"
        )


def _check_datum(place: str, datum: Datum, loss: str, vocabulary: int, max_tokens: int) -> None:
    known = LOSSES[loss]
    check_tokens(f"{place}.model_input", datum.tokens, vocabulary, max_tokens)
    required = (TARGETS, *known.required)
    if missing := [name for name in required if name not in datum.inputs]:
        raise RequestError(f"{place}.loss_fn_inputs: {loss} needs {', '.join(missing)}")
    if unknown := sorted(datum.inputs.keys() - {*required, *known.optional}):
        has = ", ".join((*required, *known.optional))
        raise RequestError(f"{place}.loss_fn_inputs: {loss} has no input {unknown[0]!r:.80}; it has {has}")
    for name, values in datum.inputs.items():
        where = f"{place}.loss_fn_inputs.{name}"
        if values.ndim != 1:
            raise RequestError(
                f"{where}: {values.ndim} dimensions, but this server takes one value for each token"
            )
        if len(values) != len(datum.tokens):
            raise RequestError(
                f"{where}: {len(values)} values for {len(datum.tokens)} tokens; give one for each token of "
                "the model input"
            )
        if name == TARGETS:
            check_tokens(where, values, vocabulary, max_tokens)
        elif not np.isfinite(values).all():
            raise RequestError(f"{where}: a value is not finite")
        if name == RATIO_MASK and not values.any():
            raise RequestError(f"{where}: it marks no token; set it to 1 for the sampled tokens")
