"""Sequence parallelism: the numbers of heads that ranks can divide."""

import pytest
from transformers import LlamaConfig

from raylight.errors import ConfigError
from raylight.learner.model.fsdp import check_heads


@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 2, 2), (4, 2, 4), (32, 8, 8), (8, 1, 4)])
def test_ranks_divide_heads_or_repeat_key_heads(heads: int, keys: int, size: int) -> None:
    check_heads(
        LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=keys), size
    )


@pytest.mark.parametrize(("heads", "keys", "size"), [(6, 3, 4), (12, 6, 4), (9, 3, 2)])
def test_ranks_that_cannot_divide_heads_are_refused(heads: int, keys: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"learner.ulysses={size} cannot divide {heads} attention heads"):
        check_heads(
            LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=keys), size
        )
