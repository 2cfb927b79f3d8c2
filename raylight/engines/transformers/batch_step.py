"""The distributions of one decoding step. An error of one sequence leaves the others of its batch alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from raylight.engines.grammar import mask_logits
from raylight.engines.transformers.sampling import adjust_logits, distribution
from raylight.engines.transformers.sequence import Sequence
from raylight.http.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchStep:
    """Sequences, and the distributions of their next tokens.

    Attributes:
        logprobs: shape (rows, vocabulary).
        policy_logits: the logits without the rows' constraints; None if no row has one.
        failed: sequences without a distribution, each with its error.
    """

    sequences: list[Sequence]
    logprobs: torch.Tensor
    policy_logits: torch.Tensor | None
    failed: list[tuple[Sequence, RequestError]]


def batch_step(sequences: list[Sequence], logits: torch.Tensor, stop_ids: Iterable[int]) -> BatchStep:
    """Apply each sequence's grammar, bias, penalties, temperature and truncation to its row.

    If that raises, every row is tried alone, and those that raise again have failed.

    Args:
        logits: shape (rows, vocabulary).
        stop_ids: tokens that end a response.

    Raises:
        Exception: no row raises alone, so that no sequence is the cause.
    """
    try:
        return BatchStep(sequences, *_distributions(sequences, logits, stop_ids), [])
    except Exception:
        errors = [_error_of(s, logits[row : row + 1], stop_ids) for row, s in enumerate(sequences)]
        if not any(errors):
            raise
    rows = [row for row, error in enumerate(errors) if error is None]
    kept = [sequences[row] for row in rows]
    failed = [(s, error) for s, error in zip(sequences, errors, strict=True) if error is not None]
    if not kept:
        return BatchStep([], logits[:0], None, failed)
    return BatchStep(kept, *_distributions(kept, logits[rows], stop_ids), failed)


def sequence_error(error: BaseException) -> RequestError:
    """Return the error of a sequence that failed alone, and log its cause."""
    logger.error("a sequence failed; the others of its batch go on", exc_info=error)
    return RequestError(f"the engine failed: {type(error).__name__}: {error!s:.500}", 500, "server_error")


def _error_of(sequence: Sequence, logits: torch.Tensor, stop_ids: Iterable[int]) -> RequestError | None:
    try:
        _distributions([sequence], logits, stop_ids)
    except Exception as error:  # of any kind: the request's own values caused it
        return sequence_error(error)
    return None


def _distributions(
    sequences: list[Sequence], logits: torch.Tensor, stop_ids: Iterable[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities, and the logits without constraints if a row has one."""
    params = [s.params for s in sequences]
    policy_logits = logits if any(p.constrained for p in params) else None
    if any(s.grammar_matcher is not None for s in sequences):
        logits = mask_logits(logits, [s.grammar_matcher for s in sequences])
    if any(p.adjusts_logits for p in params):
        histories = [(s.sample.prompt_ids, s.sample.output_ids) for s in sequences]
        logits = adjust_logits(logits, params, histories, stop_ids)
    return distribution(logits, params), policy_logits
