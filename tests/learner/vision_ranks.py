"""One learner rank that updates a vision-language model, in one process or in two."""

from dataclasses import replace
from typing import Any

import torch
from vision_rows import TEXT_ROW, make_batch, plain_logprobs

from raylight.config import LearnerConfig
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.images.model_inputs import ModelImages


def main(
    rank: int, ranks: int, folder: str, config: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of an update whose rows have the log-probs of plain transformers, and the sums of
    the weights after it and an update with text alone."""
    from transformers import AutoModelForImageTextToText

    from raylight.learner.updates.policy import Policy

    images = ModelImages.load(folder)
    assert images is not None
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        exact = [logprobs.tolist() for logprobs in plain_logprobs(plain, images)]
    chosen = PolicySettings(lr=1e-3, kl_coef=0.01, weight_decay=0.1, max_logprob_mismatch=5.0, **settings)
    policy = Policy(folder, LearnerConfig(n=ranks, **config), chosen, total_steps=2)
    batch = make_batch(images, exact)
    metrics = policy.update(batch)
    rows = [replace(batch.rows[TEXT_ROW], rollout_id=str(number)) for number in range(5)]
    policy.update(replace(batch, rows=rows, image_files={}))
    weights = policy.export() or {}
    return metrics, {name: float(abs(array).sum()) for name, array in weights.items()}
