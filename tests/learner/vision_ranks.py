"""One learner rank that updates a vision-language model, in one process or in two."""

from typing import Any

import torch
import torch.distributed as dist
from vision_rows import make_batch, plain_logprobs

from raylight.config import LearnerConfig
from raylight.experience.settings import PolicySettings
from raylight.images.model_inputs import ModelImages


def main(
    rank: int, ranks: int, file: str, folder: str, config: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of an update whose rows have the log-probs of plain transformers, and the sums of
    the weights after it."""
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(file, ranks), rank=rank, world_size=ranks)
    from raylight.learner.policy import Policy

    images = ModelImages.load(folder)
    assert images is not None
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        exact = [logprobs.tolist() for logprobs in plain_logprobs(plain, images)]
    settings = PolicySettings(lr=1e-3, kl_coef=0.01, max_logprob_mismatch=1e-3)
    policy = Policy(folder, LearnerConfig(n=ranks, **config), settings, total_steps=2)
    metrics = policy.update(make_batch(images, exact))
    weights = policy.export() or {}
    dist.destroy_process_group()
    return metrics, {name: float(abs(array).sum()) for name, array in weights.items()}
