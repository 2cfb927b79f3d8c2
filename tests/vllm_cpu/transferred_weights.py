"""Send weights to two vLLM replicas over gloo: transferred_weights.py FOLDER TENSOR_PARALLEL_SIZE

Prints, as JSON, the largest difference of the replicas' log-probs from transformers', before and after each
of three versions.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from served_replicas import Served, publish_weights, served
from transformers import AutoModelForCausalLM

from raylight.quickstart import STARTER_MODEL

IDS = [5, 9, 12, 7, 20, 31, 8, 44]
VERSIONS = 3


class Learner:
    """The starter model, whose weights change."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
        torch.manual_seed(0)

    def change(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return dict(self.model.state_dict())

    def logprobs(self) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


async def difference(model: Served, learner: Learner) -> float:
    probed = await model.coordinator.probe(IDS, 120.0)
    assert len(probed) == 2
    expected = learner.logprobs()
    return max(float((torch.tensor(found) - expected).abs().max()) for found in probed.values())


async def run(folder: Path, tensor_parallel_size: int) -> dict[str, Any]:
    args = {"tensor_parallel_size": tensor_parallel_size} if tensor_parallel_size > 1 else {}
    learner = Learner()
    before, after, seconds = [], [], []
    async with served(
        folder, "vllm", replicas=2, max_model_len=256, max_concurrent=4, args=args, start_timeout_s=400
    ) as model:
        for version in range(1, VERSIONS + 1):
            weights = learner.change()
            before.append(await difference(model, learner))
            began = time.monotonic()
            assert await publish_weights(model, version, weights, 120.0) == 2
            seconds.append(time.monotonic() - began)
            after.append(await difference(model, learner))
    return {"before": before, "after": after, "seconds": seconds}


if __name__ == "__main__":
    with ray.init(log_to_driver=False):
        print(json.dumps(asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))))
