"""Token budgets of a learner: the longest row, and the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from raylight.errors import RowTooLongError
from raylight.types import Trajectory

LongRows = Literal["error", "drop", "truncate"]


class RowLimit:
    """Applies a length limit to rows, and counts the dropped and truncated ones.

    Args:
        tokens: length of the longest row; None for no limit.
        rule: treatment of longer rows.
    """

    def __init__(self, tokens: int | None, rule: LongRows) -> None:
        self._tokens, self._rule = tokens, rule
        self.dropped = 0
        self.truncated = 0

    def apply(self, row: Trajectory) -> Trajectory | None:
        """Return the row, truncated if need be, or None if it is dropped.

        A row with only prompt tokens within the limit is dropped under either rule.

        Raises:
            RowTooLongError: the row is too long, and the rule is "error".
        """
        end = self._tokens
        if end is None or len(row.token_ids) <= end:
            return row
        if self._rule == "error":
            raise RowTooLongError(
                f"rollout {row.rollout_id} has a trajectory of {len(row.token_ids)} tokens, and a learner "
                f"takes {end}: raise learner.max_row_tokens and learner.max_tokens_per_micro_batch, lower "
                "engine.max_model_len, or choose learner.long_rows='drop' or 'truncate'"
            )
        if self._rule == "drop" or not row.mask[:end].any():
            self.dropped += 1
            return None
        self.truncated += 1
        return row.first_tokens(end)


def plan_micro_batches(lengths: Sequence[int], budget: int, packed: bool) -> list[list[int]]:
    """Split rows into micro-batches of rows of similar length, longest rows first.

    A packed micro-batch costs the sum of its rows' tokens; a padded one costs its longest row for each of its
    rows. No cost exceeds `budget`, except a single longer row's.

    Args:
        lengths: tokens of each row.

    Returns:
        The row indices of each micro-batch, in ascending order.
    """
    parts: list[list[int]] = []
    used: list[int] = []  # tokens of each part
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[row]
        for i in range(len(parts)) if packed else range(len(parts))[-1:]:
            cost = length if packed else lengths[parts[i][0]]
            if used[i] + cost <= budget:
                parts[i].append(row)
                used[i] += cost
                break
        else:
            parts.append([row])
            used.append(length)
    return [sorted(part) for part in parts]
