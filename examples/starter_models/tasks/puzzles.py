"""Procedural puzzles of the package reasoning-gym, with the answers of its datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raylight.environments.reasoning_gym import create_dataset

SEED_OFFSET = 1_000_000
"""Added to the seed, so that the puzzles of a run with a small seed are others."""
PUZZLES = 16_384


def reasoning_gym(name: str, seed: int, **config: Any) -> Iterator[dict[str, Any]]:
    """Yield puzzles of a dataset with their answers.

    Args:
        name: name of the dataset, such as `chain_sum`.
        config: settings of the dataset, such as `max_terms=2`.

    Raises:
        ConfigError: reasoning-gym is not installed, or has no such dataset or setting.
    """
    dataset = create_dataset(name, PUZZLES, seed + SEED_OFFSET, config)
    for entry in dataset:
        if isinstance(entry["answer"], str):  # some puzzles have no answer, only a score
            yield {
                "messages": [
                    {"role": "user", "content": entry["question"]},
                    {"role": "assistant", "content": entry["answer"]},
                ]
            }
