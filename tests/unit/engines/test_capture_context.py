"""Routes of a sample, which an engine records in parts."""

import numpy as np
import pytest

from raylight.engines.capture_context import Sample
from raylight.types import RouteArray


def part(tokens: int, expert: int) -> RouteArray:
    return np.full((tokens, 2, 2), expert, np.uint8)


def drawn(*parts: RouteArray, output: int = 3) -> Sample:
    """A sample with a prompt of four tokens."""
    return Sample(0, np.arange(4, dtype=np.int32), {}, output_ids=[7] * output, routes=list(parts))


@pytest.mark.parametrize("last", [1, 2])
def test_the_routes_are_those_of_all_tokens_but_the_last(last: int) -> None:
    """vLLM returns none for the last token; the transformers engine may have computed it."""
    routes = drawn(part(4, 0), part(1, 1), part(last, 2)).routed_experts
    assert routes[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 2]
    assert (routes.shape, routes.dtype) == ((6, 2, 2), np.uint8)


def test_a_sample_of_which_a_part_is_missing_has_no_routes() -> None:
    assert drawn(part(4, 0), part(1, 1)).routed_experts is None
    assert drawn(part(3, 0), part(1, 1), part(1, 2)).routed_experts is None
    assert drawn().routed_experts is None
    assert drawn(part(4, 0), output=0).routed_experts is None, "nothing is sampled"
