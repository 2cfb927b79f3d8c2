"""What optimizer steps come to."""

from __future__ import annotations

import math

from raylight.errors import NonFiniteGradientError

MAX_NON_FINITE = 3
"""Gradients in a row that may be skipped for not being finite."""


class GradientWatch:
    """Counts steps whose gradient was not finite; verl skips them, and only prints."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def seen(self, norm: float) -> dict[str, float]:
        """Take note of a step's gradient norm; returns metrics.

        Raises:
            NonFiniteGradientError: it was not finite `MAX_NON_FINITE` times in a row.
        """
        skipped = not math.isfinite(norm)
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= MAX_NON_FINITE:
            raise NonFiniteGradientError(
                f"the gradient was not finite {MAX_NON_FINITE} times in a row; lower lr or grad_clip, or train in fp32"
            )
        return {"learner/skipped_steps": float(skipped)}
