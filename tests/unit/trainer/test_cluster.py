"""Finding the cluster to join: one that does not answer is never waited for."""

import socket
import time

import pytest

from raylight.errors import ConfigError
from raylight.trainer.cluster import ray_session, running_cluster


@pytest.fixture
def dead_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("alive", [True, False])
def test_ray_s_note_of_a_crashed_cluster_is_not_believed(
    alive: bool, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: f"127.0.0.1:{dead_port}")
    with socket.socket() as listening:
        if alive:
            listening.bind(("127.0.0.1", dead_port))
            listening.listen()
        assert running_cluster() == (f"127.0.0.1:{dead_port}" if alive else None)


def test_an_address_where_nothing_answers_is_an_error_at_once(dead_port: int) -> None:
    began = time.monotonic()
    with (
        pytest.raises(ConfigError, match="no Ray cluster is reachable"),
        ray_session(f"127.0.0.1:{dead_port}", False),
    ):
        pass
    assert time.monotonic() - began < 10
