"""A process group for tests of one learner rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make this process the only rank of a group, with one thread, for the tests of a module."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("rendezvous") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
