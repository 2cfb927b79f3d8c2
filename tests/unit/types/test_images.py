"""Token ids by which prompts with images are compared, and rows that are cut near one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_generation

from raylight.types import PlacedImage, Trajectory
from raylight.types.images import compared_ids

PAD = 9
A, B = "0" * 63 + "a", "f" * 63 + "b"
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


def test_ids_without_images_are_not_copied() -> None:
    ids = np.arange(4, dtype=np.int32)
    assert compared_ids(ids, ()) is ids


@given(digests)
def test_an_image_has_negative_ids(digest: str) -> None:
    ids = compared_ids(np.array([1, PAD, PAD, 2], np.int32), [PlacedImage(digest, 1, 3)])
    assert ids[[0, 3]].tolist() == [1, 2]
    assert ids[1] < 0
    assert ids[2] < 0


def test_an_image_of_two_tokens_is_not_an_image_twice() -> None:
    ids = np.array([PAD, PAD], np.int32)
    once, twice = [PlacedImage(A, 0, 2)], [PlacedImage(A, 0, 1), PlacedImage(A, 1, 2)]
    assert (compared_ids(ids, once) != compared_ids(ids, twice)).tolist() == [False, True]


def test_calls_differ_by_their_images() -> None:
    prompt, output = [1, PAD, PAD, 2], [3]
    first, second, again = (
        replace(make_generation(prompt, output), images=(PlacedImage(name, 1, 3),)).compared_ids
        for name in (A, B, A)
    )
    assert first.tolist() == again.tolist()
    assert (first != second).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(("end", "kept", "images"), [(6, 6, 1), (5, 5, 1), (4, 2, 0), (3, 2, 0), (2, 2, 0)])
def test_a_row_is_cut_before_an_image_that_does_not_fit(end: int, kept: int, images: int) -> None:
    ids = [1, 2, PAD, PAD, PAD, 3]
    row = Trajectory("r", ids, [0, 1, 0, 0, 0, 1], [0.0] * 6, [-1] * 6, images=(PlacedImage(A, 2, 5),))
    cut = row.first_tokens(end)
    assert (cut.token_ids.tolist(), len(cut.images)) == (ids[:kept], images)
