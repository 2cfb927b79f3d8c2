"""What of a mini-batch is computed at once. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget: int, packed: bool) -> list[list[int]]:
    """Places of the rows of each micro-batch, the longest rows first, so that those computed together are alike.

    A packed micro-batch takes the sum of its rows' tokens, a padded one its longest row's for each of its rows. Neither is more
    than `budget`, unless a row alone is.
    """
    parts: list[list[int]] = []
    used: list[int] = []  # tokens of each part
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[place]
        for i in range(len(parts)) if packed else range(len(parts))[-1:]:
            more = length if packed else lengths[parts[i][0]]
            if used[i] + more <= budget:
                parts[i].append(place)
                used[i] += more
                break
        else:
            parts.append([place])
            used.append(length)
    return [sorted(part) for part in parts]
