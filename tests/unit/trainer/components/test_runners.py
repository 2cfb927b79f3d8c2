"""The runners of a run, and the hosts that they call without a proxy."""

import pytest

from raylight.config import EngineConfig
from raylight.trainer.components import runners
from raylight.trainer.spec.settings import ServingSettings


@pytest.mark.parametrize(
    ("engine", "head", "here", "hosts"),
    [
        (None, "127.0.0.1", "127.0.0.1", ()),
        (None, "10.0.0.1", "10.0.0.2", ("10.0.0.1", "10.0.0.2")),
        (EngineConfig(), "10.0.0.1", "10.0.0.1", ("10.0.0.1",)),
        (EngineConfig(host="gpu.example.com"), "10.0.0.1", "10.0.0.1", ("10.0.0.1", "gpu.example.com")),
        (EngineConfig(host="0.0.0.0"), "10.0.0.1", "127.0.0.1", ("10.0.0.1",)),
        (EngineConfig(host="localhost"), "127.0.0.1", "127.0.0.1", ()),
    ],
)
def test_hosts_of_the_gateway(
    engine: EngineConfig | None, head: str, here: str, hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "head_node", lambda: {"NodeManagerAddress": head})
    monkeypatch.setattr(runners.ray.util, "get_node_ip_address", lambda: here)
    serving = None if engine is None else ServingSettings("model", engine)
    assert runners.gateway_hosts(serving) == hosts
