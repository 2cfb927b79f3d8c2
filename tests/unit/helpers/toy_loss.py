"""Toy policy loss: the policy gradient of tokens whose probability has at most doubled since sampling."""

from typing import Any

import raylight as rl


@rl.policy_loss("at_most_doubled")
def at_most_doubled(log_prob: Any, old_log_prob: Any, advantages: Any) -> Any:
    """Return the loss of each token, shape (rows, tokens)."""
    ratio = (log_prob - old_log_prob).exp()
    return -(advantages * ratio).where(ratio <= 2, 0.0)
