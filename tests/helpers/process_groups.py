"""Process groups of torch in tests."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """Make this process the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
