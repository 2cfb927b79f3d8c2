"""What becomes of trajectories that are longer than a learner takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from raylight.errors import RowTooLongError
from raylight.types import Trajectory

LongRows = Literal["error", "drop", "truncate"]


class RowLimit:
    """Applies a limit to rows, and counts.

    Args:
        tokens: of the longest row; None for no limit.
    """

    def __init__(self, tokens: int | None, rule: LongRows) -> None:
        self._tokens, self._rule = tokens, rule
        self.dropped = 0
        self.truncated = 0

    def applied(self, row: Trajectory) -> Trajectory | None:
        """The row, as far as it may be trained; None if it is left out. One of which only the prompt is within the limit is left
        out by either rule.

        Raises:
            RowTooLongError: it is too long, and the rule is "error".
        """
        end = self._tokens
        if end is None or len(row.token_ids) <= end:
            return row
        if self._rule == "error":
            raise RowTooLongError(
                f"rollout {row.rollout_id} has a trajectory of {len(row.token_ids)} tokens, and a learner takes {end}: raise "
                "learner.max_row_tokens and learner.max_tokens_per_micro_batch, lower engine.max_model_len, or choose "
                "learner.long_rows='drop' or 'truncate'"
            )
        if self._rule == "drop" or not any(row.mask[:end]):
            self.dropped += 1
            return None
        self.truncated += 1
        return replace(
            row,
            token_ids=row.token_ids[:end],
            mask=row.mask[:end],
            logprobs=row.logprobs[:end],
            weight_versions=row.weight_versions[:end],
        )
