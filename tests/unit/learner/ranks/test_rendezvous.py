"""Network interfaces of the learner ranks' collectives."""

import importlib.util
import os
import socket
import subprocess
import sys

import psutil
import pytest

from raylight.errors import LearnerError
from raylight.learner.ranks import rendezvous
from raylight.learner.ranks.rendezvous import GLOO, NCCL, find_interface, use_interface_of

READ_NCCL_ID = """
import ctypes, pathlib, socket
import nvidia.nccl
(library,) = pathlib.Path(next(iter(nvidia.nccl.__path__))).rglob("libnccl.so*")
class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]
made = Id()
assert ctypes.CDLL(str(library)).ncclGetUniqueId(ctypes.byref(made)) == 0
print(socket.inet_ntoa(bytes(made)[12:16]))
"""


def test_the_interface_is_found_by_the_address_of_the_node() -> None:
    assert find_interface("127.0.0.1", "GLOO_SOCKET_IFNAME").startswith("lo")
    with pytest.raises(
        LearnerError, match=r"has its cluster address 203.0.113.7; set GLOO_SOCKET_IFNAME to "
    ):
        find_interface("203.0.113.7", "GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(("store", "gloo"), [("127.0.0.1", "lo"), ("10.0.0.7", "eth0")])
def test_other_nodes_reach_the_groups_of_nccl(store: str, gloo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks may be on one node: engines on others join a group for the weights."""
    monkeypatch.setattr(rendezvous.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    found = {"127.0.0.1": "lo", "10.0.0.7": "eth0"}
    monkeypatch.setattr(rendezvous, "find_interface", lambda address, variable: found[address])
    for variable in (GLOO, NCCL):
        monkeypatch.setenv(variable, "mine")
    use_interface_of(store, on_gpu=True)
    assert (os.environ[GLOO], os.environ[NCCL]) == ("mine", "mine")
    for variable in (GLOO, NCCL):
        monkeypatch.delenv(variable)
    use_interface_of(store, on_gpu=False)
    assert (os.environ[GLOO], os.environ.get(NCCL)) == (gloo, None)
    use_interface_of(store, on_gpu=True)
    assert os.environ[NCCL] == "=eth0"


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nccl") is None,
    reason="needs NCCL, which torch's builds for GPUs install",
)
def test_the_id_of_a_group_of_nccl_has_the_address_of_its_interface() -> None:
    """NCCL makes an id without a GPU: 8 bytes, and then the socket's address."""
    address = next(
        known.address
        for name, addresses in psutil.net_if_addrs().items()
        for known in addresses
        if known.family == socket.AF_INET and known.address != "127.0.0.1"
    )
    for expected in ("127.0.0.1", address):
        command = [sys.executable, "-c", READ_NCCL_ID]
        environment = os.environ | {NCCL: f"={find_interface(expected, NCCL)}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
