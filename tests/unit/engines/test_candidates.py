"""Candidates of sampled tokens: exclusions, and biases that ban."""

import torch

from raylight.engines.candidates import find_candidates
from raylight.types import TokenSets


def test_tokens_that_a_bias_bans_are_no_candidates_of_a_truncated_row() -> None:
    """The first row keeps the 4 most probable tokens; a bias leaves two of them at e^-100."""
    logits = torch.zeros(3, 40)
    logits[0, 4:] = -torch.inf
    logits[0, 2:4] = -100.0
    logits[1, 0] = 100.0  # nothing is excluded: the policy itself is sure
    logits[2, :3] = -torch.inf
    found = find_candidates(logits.log_softmax(-1))
    allowed = torch.ones(3, 40, dtype=torch.bool)
    allowed[0, 2:], allowed[2, :3] = False, False
    assert found == TokenSets.from_mask(allowed.numpy())
