"""Rows of one tokenizer in the tokens of another, aligned where both have the same text before a boundary.

A span is the text between two common boundaries. Its probability is the product of its tokens' in either
tokenizer, so that a model and a teacher with other tokens can be compared on it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raylight.errors import ConfigError
from raylight.types import IntArray, LogprobArray, MaskArray

WITHIN_SPAN = np.nan
"""Log-prob of a token that does not end its span."""
NOT_JUDGED = np.inf
"""Log-prob of the last token of a span that the teacher cannot read: a character that was cut off."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class AlignedTokens:
    """A row in the tokens of another tokenizer.

    Each span is a pair of ends: the numbers of own and of other tokens up to its end.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    unread: frozenset[int]
    """Own ends of spans that the other tokenizer cannot read."""

    def place(self, own: int) -> int:
        """Return the number of other tokens up to the end of a span, given the number of own tokens."""
        return next((other for end, other in self.spans if end == own), 0)


class TokenAligner:
    """Alignment of two tokenizers.

    A special token is a separate span. In the other tokenizer it is the token of the same text, or the end
    of a sequence for an end of a sequence, or plain text.

    Args:
        own: Hugging Face tokenizer of the rows.
        other: the teacher's.

    Raises:
        ConfigError: the other tokenizer does not know where the text of its tokens ends.
    """

    def __init__(self, own: Any, other: Any) -> None:
        if not other.is_fast:
            raise ConfigError(
                f"the tokenizer of the teacher {other.name_or_path} is not a fast one of transformers, which "
                "knows where the text of each token ends; choose a teacher with a tokenizer.json"
            )
        self._own, self._other = own, other
        # a post-processor may cut white space off the offsets; without special tokens it does nothing else
        self._encoder = copy.deepcopy(other.backend_tokenizer)
        self._encoder.post_processor = None
        self._specials = {*own.all_special_ids, *own.added_tokens_decoder}
        self._known = {token.content: number for number, token in other.added_tokens_decoder.items()}

    def align(self, ids: IntArray, mask: MaskArray) -> AlignedTokens:
        """Return a row in the other tokenizer's tokens. No span contains both sampled tokens and others.

        Args:
            ids, mask: tokens of the row, and 1 for sampled ones, both of shape (tokens,).
        """
        found, spans, unread = list[int](), list[tuple[int, int]](), set[int]()
        end = 0
        for run in self._runs(ids.tolist(), mask.tolist()):
            start, base, end = end, len(found), end + len(run)
            if run[0] in self._specials:
                more = self._special(run[0])
                pairs = [(len(run), len(more))]
            else:
                more, pairs = self._text(run, unread, start)
                pairs = pairs or [(len(run), len(more))]
            found += more
            spans += [(start + own, base + other) for own, other in pairs]
        return AlignedTokens(found, spans, frozenset(unread))

    def _runs(self, ids: list[int], mask: list[int]) -> Iterator[list[int]]:
        """Yield single special tokens, and the other tokens between them, sampled ones or not."""

        def kind(place: int) -> tuple[int, int]:
            return mask[place], place if ids[place] in self._specials else -1

        for _, places in itertools.groupby(range(len(ids)), kind):
            yield [ids[place] for place in places]

    def _special(self, token: int) -> list[int]:
        text = self._own.convert_ids_to_tokens(token)
        if text in self._known:
            return [self._known[text]]
        if token == self._own.eos_token_id and self._other.eos_token_id is not None:
            return [self._other.eos_token_id]
        return list(self._other.encode(text, add_special_tokens=False))

    def _text(self, run: list[int], unread: set[int], start: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a run's text, and the ends of its spans within the run."""
        text, ends = self._ends(run)
        encoded = self._encoder.encode(text, add_special_tokens=False)
        others: dict[int, int] = {}
        for number, (_, stop) in enumerate(encoded.offsets, 1):
            others[stop] = number  # the last of the tokens of one character
        pairs = [(own, others[stop]) for stop, own in ends.items() if stop in others]
        whole = len(run), len(encoded.ids)
        if not pairs or pairs[-1][0] < len(run):
            pairs.append(whole)
            if text.endswith(REPLACEMENT):
                unread.add(start + len(run))
        return list(encoded.ids), pairs

    def _ends(self, run: list[int]) -> tuple[str, dict[int, int]]:
        """Return the text of a run, and the number of tokens up to each place where its text can be cut."""
        text, ends, first = "", dict[int, int](), 0
        for number in range(1, len(run) + 1):
            # with the token before, which shows a decoder where spaces belong
            before = max(first - 1, 0)
            known = self._decode(run[before:first])
            piece = self._decode(run[before:number])[len(known) :]
            if piece.endswith(REPLACEMENT) and number < len(run):
                continue
            text += piece
            if not piece.endswith(REPLACEMENT):
                ends[len(text)] = number
            first = number
        return text, ends

    def _decode(self, ids: list[int]) -> str:
        return str(self._own.backend_tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def load_aligner(own_path: str, other_path: str) -> TokenAligner:
    """Return the alignment of the tokenizers of two model folders.

    Raises:
        ConfigError: a tokenizer cannot be loaded or aligned.
    """
    from transformers import AutoTokenizer

    tokenizers = []
    for path in (own_path, other_path):
        try:
            tokenizers.append(AutoTokenizer.from_pretrained(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer of {path} cannot be loaded: {error}") from None
    return TokenAligner(*tokenizers)


def span_logprobs(
    aligned: AlignedTokens, logprobs: Sequence[float] | LogprobArray, scored: int
) -> LogprobArray:
    """Return the other model's log-prob of each span, at its last own token.

    Args:
        logprobs: of the other tokenizer's tokens from index `scored` on.

    Returns:
        float32 of shape (own tokens,); WITHIN_SPAN for tokens that do not end a span, 0 for spans that were
        not scored.
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(logprobs, np.float64))])
    found = np.full(aligned.spans[-1][0] if aligned.spans else 0, WITHIN_SPAN, np.float32)
    start = 0
    for own, other in aligned.spans:
        first, last = max(start - scored, 0), max(other - scored, 0)
        found[own - 1] = NOT_JUDGED if own in aligned.unread else total[last] - total[first]
        start = other
    return found
