"""Rows in the tokens of another tokenizer, aligned at the ends of equal texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

from raylight.errors import ConfigError
from raylight.experience.token_alignment import NOT_JUDGED, TokenAligner, load_aligner, span_logprobs
from raylight.quickstart import STARTER_MODEL, TOOL_MODEL

BYTES, WORDS = map(AutoTokenizer.from_pretrained, (STARTER_MODEL, TOOL_MODEL))
TEXTS = st.text(alphabet="ab The answer is 42,\n\u00e9\U0001f469", max_size=30)


def encoded(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(TEXTS, TEXTS, st.booleans())
def test_spans_have_the_same_text(prompt: str, answer: str, to_words: bool) -> None:
    own, other = (BYTES, WORDS) if to_words else (WORDS, BYTES)
    first, second = encoded(own, prompt), encoded(own, answer)
    ids = [*first, own.eos_token_id, *second, own.eos_token_id]
    mask = [0] * (len(first) + 1) + [1] * (len(second) + 1)
    found = TokenAligner(own, other).align(np.array(ids, np.int32), np.array(mask, np.int8))
    assert other.decode(found.ids) == own.decode(ids)
    assert found.spans[-1] == (len(ids), len(found.ids))
    start = (0, 0)
    for end in found.spans:
        assert own.decode(ids[start[0] : end[0]]) == other.decode(found.ids[start[1] : end[1]])
        assert len({*mask[start[0] : end[0]]}) == 1, "no span has sampled tokens and others"
        start = end
    logprobs = np.arange(len(found.ids), dtype=np.float64)
    spans = span_logprobs(found, logprobs, 0)
    assert np.nansum(spans) == pytest.approx(logprobs.sum())
    assert np.count_nonzero(~np.isnan(spans)) == len(found.spans)
    scored = found.place(len(first) + 1)
    later = span_logprobs(found, logprobs[scored:], scored)[len(first) + 1 :]
    np.testing.assert_allclose(later, spans[len(first) + 1 :], rtol=1e-6)


def test_a_character_that_was_cut_off_is_not_judged() -> None:
    ids = encoded(BYTES, "a\U0001f469")[:-1]
    found = TokenAligner(BYTES, WORDS).align(np.array(ids, np.int32), np.ones(len(ids), np.int8))
    spans = span_logprobs(found, [-1.0] * len(found.ids), 0)
    assert (spans[0], spans[-1]) == (-1.0, NOT_JUDGED)
    assert np.isnan(spans[1:-1]).all()


def test_white_space_belongs_to_the_token_that_it_ends() -> None:
    """Tokenizers whose post-processor trims leave it out of the offsets of tokens."""
    other = AutoTokenizer.from_pretrained(TOOL_MODEL)
    other.add_tokens([AddedToken("42.\n\n", normalized=False)])
    ids = np.array(encoded(BYTES, "is 42.\n\n"), np.int32)
    expected = TokenAligner(BYTES, other).align(ids, np.ones(len(ids), np.int8))
    other.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert other("42.\n\n", return_offsets_mapping=True)["offset_mapping"] == [(0, 3)]
    assert TokenAligner(BYTES, other).align(ids, np.ones(len(ids), np.int8)) == expected
    assert expected.spans[-1] == (len(ids), len(expected.ids))
    assert expected.spans[-2][0] == len(ids) - 5


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast, name_or_path = False, "slow"

    with pytest.raises(ConfigError, match=r"the tokenizer of the teacher slow is not a fast one"):
        TokenAligner(BYTES, Slow())
    with pytest.raises(ConfigError, match=r"the tokenizer of /none cannot be loaded"):
        load_aligner(STARTER_MODEL, "/none")
