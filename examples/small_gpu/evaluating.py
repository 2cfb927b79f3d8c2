"""What training's `--debug` and the benchmark share: the engine of a small machine, and printed traces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import raylight as rl


def engine(max_model_len: int = 1024) -> dict[str, Any]:
    """Settings of the engine for 4 GB: half precision on a GPU, few sequences at once."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "kind": "transformers", "num_gpus": 1 if on_gpu else 0, "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": max_model_len, "max_concurrent": 16,
    }  # fmt: skip


def print_traces(path: Path) -> None:
    """Print every rollout of a store with all its spans and their attributes."""
    for rollout, spans in asyncio.run(_read(path)):
        print(f"=== {rollout.rollout_id}: {rollout.status}, task {rollout.input}")
        for span in spans:
            print(f"--- #{span.sequence_id} {span.name} {span.status.status_code}")
            for key, value in span.attributes.items():
                print(f"    {key} = {value}")
        print(f"reward: {rl.find_final_reward(spans)}")


async def _read(path: Path) -> list[tuple[rl.Rollout, list[rl.Span]]]:
    service = rl.StoreService(str(path), read_only=True)
    try:
        store = rl.StoreClient(service)
        return [(found, list(await store.query_spans(found.rollout_id, "latest"))) for found in await store.query_rollouts()]
    finally:
        await service.close()
