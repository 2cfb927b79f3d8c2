"""Addresses that programs in sandboxes are given."""

from __future__ import annotations

import pytest

from raylight.sandboxes.relay import reach_of


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("127.0.0.1:8000", "machine"),
        ("localhost", "machine"),
        ("[::1]:80", "machine"),
        ("10.0.0.7", "network"),
        ("0.0.0.0", "network"),
        ("head-node:8000", "network"),
        ("8.8.8.8", "internet"),
        ("model.example.com", "internet"),
    ],
)
def test_the_reach_of_an_address(host: str, reach: str) -> None:
    assert reach_of(f"http://{host}/v1") == reach
