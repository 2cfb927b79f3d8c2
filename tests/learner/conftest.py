"""A process group for tests of one learner rank, and one check of the starter model."""

import functools
from collections.abc import Iterator

import pytest
import torch
from process_groups import only_rank


@pytest.fixture(autouse=True, scope="session")
def starter_model_is_checked_once() -> Iterator[None]:
    """Check the starter model before its first policy only: a check takes as long as an update."""
    from raylight.learner.model import verl_engines
    from raylight.quickstart import STARTER_MODEL

    check = verl_engines.check_model
    checked = functools.cache(check)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            verl_engines, "check_model", lambda path: (checked if path == STARTER_MODEL else check)(path)
        )
        yield


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a group, with one thread, for the tests of a module."""
    torch.set_num_threads(1)
    with only_rank():
        yield
