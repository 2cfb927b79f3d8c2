"""Every listening socket of a local run is known, with its address and its key."""

from pathlib import Path

import pytest
from listening_sockets import KNOWN, sockets_of_run, unknown


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.slow
def test_a_local_run_listens_where_it_is_documented_to(tmp_path: Path) -> None:
    sockets = sockets_of_run(tmp_path, {"num_cpus": 0.4})
    assert unknown(sockets, KNOWN) == []
    for kind in KNOWN:
        if kind.protocol == "udp":  # opened with the first line of the log, by each process of HAProxy
            continue
        matching = len(sockets) - len(unknown(sockets, [kind]))
        assert matching, f"no socket is described by {kind}"


@pytest.mark.parametrize(
    "address", ["0.0.0.0", *(pytest.param(a, marks=pytest.mark.slow) for a in ("::", "192.0.2.7"))]
)
def test_a_socket_on_another_interface_is_found(address: str) -> None:
    learner = {"process": "ray::LearnerActor.update", "protocol": "tcp", "address": address, "port": 29500}
    assert unknown([learner | {"address": "127.0.0.1"}], KNOWN) == []
    assert unknown([learner], KNOWN) == [learner]
