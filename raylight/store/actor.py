"""The store as a Ray actor: a thin shell around StoreService."""

from __future__ import annotations

from typing import Any

import ray

from raylight.store.service import StoreService

STORE_NAME = "store"


class StoreActor(StoreService):
    """Holds rollouts, spans and generations of one run; asynchronous, so that long polls do not block one another."""


def start_store(namespace: str) -> Any:
    """Start the run's store and return its actor handle."""
    cls = ray.remote(StoreActor)
    return cls.options(name=STORE_NAME, namespace=namespace, num_cpus=0, max_concurrency=10_000).remote()
