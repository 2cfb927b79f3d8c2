"""The tokens of a rollout: each with its text, log-probs, version, advantage and mask."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raylight.errors import QueryError
from raylight.experience.batches.token_records import RecordedRow
from raylight.experience.trajectories.row_rules import DEFAULT_RULES, RowRules, trained_rows
from raylight.experience.trajectories.staleness import StaleMask
from raylight.types import FinishedRollout, Generation, IntArray

logger = logging.getLogger(__name__)

PROMPT, SAMPLED, OBSERVATION = 0, 1, 2
"""Kinds of tokens."""
MAX_TOKENS = 65_536
"""Tokens in one answer of the server."""
MAX_BINS = 4_096

FloatArray = NDArray[np.float64]


@dataclass(eq=False)
class TokenRow:
    """A sequence of tokens with what is known of each. Log-probs, version and advantage are NaN where there
    is none."""

    ids: IntArray
    kind: NDArray[np.int8] = field(init=False)
    trained: NDArray[np.int8] = field(init=False)
    call: NDArray[np.int32] = field(init=False)
    """Number of the call that sampled the token, from 1 on; 0 for none."""
    logprob: FloatArray = field(init=False)
    learner_logprob: FloatArray = field(init=False)
    version: FloatArray = field(init=False)
    advantage: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.ids)
        self.kind, self.trained = np.zeros((2, size), np.int8)
        self.call = np.zeros(size, np.int32)
        self.logprob, self.learner_logprob, self.version, self.advantage = np.full((4, size), np.nan)

    def call_starts(self) -> dict[int, int]:
        """Return the position of the first sampled token of each call of the row."""
        numbers, positions = np.unique(self.call, return_index=True)
        return {n: first for n, first in zip(numbers.tolist(), positions.tolist(), strict=True) if n}

    @property
    def start(self) -> int:
        """Number of tokens before the first trained one."""
        return int(self.trained.argmax()) if self.trained.any() else len(self.ids)


class TokenTexts(Protocol):
    """The part of a tokenizer that the view uses."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...


def token_rows(
    finished: FinishedRollout,
    recorded: Sequence[RecordedRow] | None = None,
    rules: RowRules = DEFAULT_RULES,
    stale: StaleMask | None = None,
) -> list[TokenRow]:
    """Return the rows of a rollout, then each call that is in none of them.

    Args:
        finished: the rollout, with its spans.
        recorded: what the learners computed of its rows: of all that were trained. None: its step has no
            records, and the rules tell what was, or will be.
        rules: the run's choice of calls and rows to train.
        stale: mask of the tokens that were too old for their step; None for no such limit.
    """
    numbers = {id(call): number for number, call in enumerate(finished.generations, 1)}
    trajectories, chosen = trained_rows(finished, rules)
    masked = stale.apply(trajectories) if stale else trajectories
    rows: list[TokenRow] = []
    for index, trajectory in enumerate(masked.rows):
        rows.append(TokenRow(trajectory.token_ids))
        if index in chosen and finished.rollout.mode != "val":
            rows[-1].trained = trajectory.mask.astype(np.int8)
    in_rows = set()
    for call, position in zip(trajectories.calls, trajectories.positions, strict=True):
        in_rows.add(id(call))
        _enter(rows[position.row], call, position.last_token + 1, numbers[id(call)])
    for call in finished.generations:
        if id(call) not in in_rows:
            row = TokenRow(call.token_ids)
            _enter(row, call, len(row.ids), numbers[id(call)])
            rows.append(row)
    for row in rows:
        first = int((row.kind == SAMPLED).argmax()) if (row.kind == SAMPLED).any() else len(row.ids)
        row.kind[first:][row.kind[first:] == PROMPT] = OBSERVATION
    if recorded is not None:
        _add_records(rows, recorded)
    return rows


def _enter(row: TokenRow, call: Generation, end: int, number: int) -> None:
    """Enter the sampled tokens of a call, which end at `end`."""
    part = slice(end - len(call.output_ids), end)
    row.kind[part], row.call[part] = SAMPLED, number
    row.logprob[part], row.version[part] = call.logprobs, call.weight_versions


def _add_records(rows: Sequence[TokenRow], recorded: Sequence[RecordedRow]) -> None:
    """Enter what the learners computed. A recorded row can be shorter than the row, if it was truncated; what
    is not recorded was not trained."""
    free = list(rows)
    for record in recorded:
        size = len(record.advantages)
        fitting = (row for row in free if row.start == record.start and len(row.ids) >= record.start + size)
        if (row := next(fitting, None)) is not None:
            free.remove(row)
            part = slice(record.start, record.start + size)
            is_trained = row.trained[part] == 1
            row.learner_logprob[part] = np.where(is_trained, record.logprobs, np.nan)
            row.advantage[part] = np.where(is_trained, record.advantages, np.nan)
            row.trained[part.stop :] = 0
    for row in free:
        row.trained[:] = 0


def page(row: TokenRow, offset: int, limit: int, tokenizer: TokenTexts | None) -> dict[str, list[object]]:
    """Return a part of a row as columns.

    Raises:
        QueryError: the part is out of range.
    """
    if offset < 0 or not 0 < limit <= MAX_TOKENS:
        raise QueryError(
            f"offset must be at least 0 and limit between 1 and {MAX_TOKENS}, not {offset} and {limit}"
        )
    part = slice(offset, offset + limit)
    ids = row.ids[part].tolist()
    return {
        "id": ids,
        "text": [None] * len(ids) if tokenizer is None else [_text(tokenizer, token) for token in ids],
        "kind": row.kind[part].tolist(),
        "trained": row.trained[part].tolist(),
        "call": [number or None for number in row.call[part].tolist()],
        "logprob": _numbers(row.logprob[part]),
        "learner_logprob": _numbers(row.learner_logprob[part]),
        "version": [None if value is None else int(value) for value in _numbers(row.version[part])],
        "advantage": _numbers(row.advantage[part]),
    }


def summary(row: TokenRow, bins: int) -> dict[str, list[float | None]]:
    """Return the means of nearly equal parts of a row.

    Raises:
        QueryError: `bins` is out of range.
    """
    if not 0 < bins <= MAX_BINS:
        raise QueryError(f"bins must be between 1 and {MAX_BINS}, not {bins}")
    edges = np.linspace(0, len(row.ids), min(bins, len(row.ids)) + 1).astype(int)
    columns = {
        "logprob": row.logprob,
        "learner_logprob": row.learner_logprob,
        "difference": row.learner_logprob - row.logprob,
        "version": row.version,
        "advantage": row.advantage,
        "kind": row.kind.astype(float),
        "trained": row.trained.astype(float),
    }
    return {name: _numbers(_means(values, edges)) for name, values in columns.items()}


def _means(values: FloatArray, edges: NDArray[np.int_]) -> FloatArray:
    """Return the mean of each part, shape (parts,), without NaN; NaN for a part of NaN only."""
    if len(edges) < 2:
        return np.empty(0)
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1])
    counts = np.add.reduceat(known.astype(float), edges[:-1])
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def _numbers(values: FloatArray) -> list[float | None]:
    """Return numbers as JSON has them, with at most six significant digits."""
    finite = np.isfinite(values)
    return [
        float(f"{value:.6g}") if known else None for value, known in zip(values.tolist(), finite, strict=True)
    ]


def _text(tokenizer: TokenTexts, token: int) -> str:
    try:
        piece = tokenizer.id_to_token(token) or ""
        if "\u2581" in piece:  # SentencePiece's space, which the text of a single token would lack
            return piece.replace("\u2581", " ")
        return tokenizer.decode([token], skip_special_tokens=False)
    except (OverflowError, IndexError, ValueError):  # an id that the tokenizer does not have
        return ""


@functools.lru_cache(maxsize=8)
def load_tokenizer(model: str) -> TokenTexts | None:
    """Return the tokenizer in a model's folder; None if there is none that loads fast."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception as error:  # the library raises no narrower one
        logger.warning("tokens are shown without text, because %s cannot be read: %s", file, error)
        return None


def find_tokenizer(folders: Iterable[str]) -> TokenTexts | None:
    """Return the tokenizer in the first folder that has one; None if none has."""
    return next(filter(None, map(load_tokenizer, folders)), None)
