"""Incremental conversion of tokens to text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from raylight.engines.transformers.text import TextStream, overlap


def by_bytes() -> Tokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    raw = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def by_words() -> Tokenizer:
    """A decoder like Llama's: a space before each word except the first."""
    words = ["▁hello", "▁world", "lo", "<0xE2>", "<0x82>", "<0xAC>", "▁"]
    raw = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


BYTES, WORDS = by_bytes(), by_words()


def stream_all(
    raw: Tokenizer, ids: list[int], sizes: list[int] | None = None, **settings: object
) -> list[str]:
    """Return the text of each feed, and of `finish`."""
    stream = TextStream(raw.decode, **settings)  # type: ignore[arg-type]
    parts, start = [], 0
    for size in sizes or [1] * len(ids):
        parts.append(stream.feed(ids[start : start + size]))
        start += size
    return [*parts, stream.feed(ids[start:]), stream.finish()]


@given(st.text(max_size=20), st.lists(st.integers(0, 5), max_size=10))
def test_any_text_comes_whole_and_never_with_half_a_character(text: str, sizes: list[int]) -> None:
    ids = BYTES.encode(text).ids
    parts = stream_all(BYTES, ids, sizes)
    assert "".join(parts) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_come_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    assert "".join(stream_all(BYTES, ids)) == BYTES.decode(ids)


@given(st.lists(st.sampled_from([0, 1, 2, 6]), max_size=10))
def test_spaces_between_words_stay(ids: list[int]) -> None:
    assert "".join(stream_all(WORDS, ids)) == WORDS.decode(ids)


def test_bytes_of_one_character_are_one_character() -> None:
    assert stream_all(WORDS, [0, 3, 4, 5, 1]) == ["hello", "", "", "€", " world", "", ""]


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 4)),
)
def test_the_text_ends_before_the_first_stop_word(text: str, words: list[str], sizes: list[int]) -> None:
    whole = "".join(stream_all(BYTES, BYTES.encode(text).ids, sizes, stop=tuple(words)))
    fed = [text[:end] for end in itertools.accumulate(sizes or [1] * len(text))]
    seen = next((part for part in fed if any(word in part for word in words)), text)
    assert whole == seen[: min((seen.index(word) for word in words if word in seen), default=None)]


def test_what_may_become_a_stop_word_is_held_back_until_it_is_known() -> None:
    assert stream_all(BYTES, BYTES.encode("a<en<end").ids, stop=("<end>",)) == [
        "a",
        "",
        "",
        "",
        "<en",
        "",
        "",
        "",
        "",
        "<end",
    ]


def test_stop_words_that_the_first_tokens_complete_do_not_count() -> None:
    for sizes in ([1] * 6, [6], [2, 4]):
        stream = TextStream(BYTES.decode, ("b",), min_tokens=3)
        ids, text, start = BYTES.encode("abcabc").ids, "", 0
        for size in sizes:
            text += stream.feed(ids[start : start + size])
            start += size
        assert (text, stream.stopped) == ("abca", True)


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [("ab", "bc", 1), ("ab", "ab", 0), ("aa", "aab", 2), ("", "a", 0), ("x", "ab", 0)],
)
def test_overlap(text: str, word: str, expected: int) -> None:
    assert overlap(text, word) == expected
