"""Training states of a learner on a GPU: copied to pinned host memory, and loaded onto the device."""

from collections.abc import Callable
from typing import Any

import pytest

CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": {"lora": {"rank": 8}},
    "offloaded": {"param_offload": True, "optimizer_offload": True},
}
CASES = [
    pytest.param("tiny", "cpu", marks=pytest.mark.slow),
    pytest.param("0.5B", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("shape", "device"), CASES)
def test_a_state_continues_the_policy(
    shape: str,
    device: str,
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    model = models(shape, device)
    results = program("state_program.py", model=model, device=device, shape=shape, configs=CONFIGS)
    tolerance = 0.0 if device == "cpu" else 1e-4  # kernels of a GPU add in any order
    for name, found in results.items():
        figure(f"{name}: training waits", found["blocked_s"], "s")
        figure(f"{name}: loading", found["load_s"], "s")
        assert found["on_host"]
        assert found["loaded"] == pytest.approx(found["saved"], abs=tolerance)
        assert found["resumed"] == pytest.approx(found["continued"], abs=tolerance)
        assert found["continued"] != found["saved"]
