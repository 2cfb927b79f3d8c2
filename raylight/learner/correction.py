"""Engine and learner compared: how far their log-probs are apart, and what is done about it."""

from __future__ import annotations

import torch

from raylight.errors import MismatchError
from raylight.learner.rows import Row
from raylight.learner.settings import CorrectionSettings


def measure(rows: list[Row], version: int, settings: CorrectionSettings) -> dict[str, float]:
    """How far the engine's log-probs are from the old policy's, over sampled tokens of `version`, on all ranks.

    Raises:
        MismatchError: they differ by more than `max_logprob_mismatch`, or no token is of that version.
    """
    diffs = [_differences(row, version) for row in rows]
    gathered = torch.cat(diffs) if diffs else torch.zeros(0)
    worst = torch.tensor(float(gathered.max()) if len(gathered) else 0.0)
    sums = torch.tensor([float(gathered.sum()), float(len(gathered))])
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(sums)
    limit = settings.max_logprob_mismatch
    if not sums[1]:
        raise MismatchError(
            f"no token of the batch was sampled from weight version {version}: the engine did not take the new weights"
        )
    if not float(worst) <= limit:  # also when it is NaN
        raise MismatchError(
            f"log-probs of engine and learner differ by up to {float(worst):.2g} for weight version {version}, more than "
            f"{limit:g}. Either the agent samples with top_p, top_k or a grammar (JSON schema, required tools), or the engine "
            "lacks these weights; max_logprob_mismatch sets the limit"
        )
    return {"mismatch/logprob_abs_max": float(worst), "mismatch/logprob_abs_mean": float(sums[0] / sums[1].clamp(min=1))}


def correct(rows: list[Row], settings: CorrectionSettings) -> dict[str, float]:
    """Give rows their importance weights, and mask what is left out, in place; returns metrics of all ranks.

    A collective. Each row has the log-probs of the old policy.
    """
    raise NotImplementedError


def _differences(row: Row, version: int) -> torch.Tensor:
    """Absolute log-prob differences of a row's sampled tokens of a version."""
    assert row.old_logprobs is not None
    chosen = (row.mask == 1) & (row.versions == version)
    return (row.old_logprobs - row.engine_logprobs)[chosen].abs()
