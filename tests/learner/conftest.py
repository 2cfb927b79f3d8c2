"""A process group for tests of one learner rank, and one check of the starter model."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="session")
def starter_model_is_checked_once() -> Iterator[None]:
    """Check the starter model before its first policy only: a check takes as long as an update."""
    from raylight.learner.model import engines
    from raylight.quickstart import STARTER_MODEL

    check = engines.check_model
    checked = functools.cache(check)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engines, "check_model", lambda path: (checked if path == STARTER_MODEL else check)(path)
        )
        yield


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make this process the only rank of a group, with one thread, for the tests of a module."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("rendezvous") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
