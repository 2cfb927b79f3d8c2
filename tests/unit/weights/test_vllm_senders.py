"""The client of vLLM's ipc engine: rank 0 must meet the other ranks after every buffer, whatever fails."""

from types import SimpleNamespace
from typing import Any

import pytest

from raylight.errors import TransferBrokenError
from raylight.weights.vllm_senders import DeferredFailures


@pytest.mark.parametrize("phase", ["start", "update", "finish"])
def test_a_failure_is_raised_when_all_buffers_were_passed(phase: str) -> None:
    calls: list[str] = []
    fails = [phase]

    def call(name: str, *args: Any) -> None:
        calls.append(name)
        if name in fails:
            raise TransferBrokenError("r1 was lost")

    inner: Any = SimpleNamespace(
        init_weight_transfer_engine=lambda info: call("init"),
        start_weight_update=lambda: call("start"),
        update_weights=lambda info: call("update"),
        finish_weight_update=lambda: call("finish"),
    )
    client = DeferredFailures(inner)

    def send() -> None:
        client.start_weight_update()
        client.update_weights({})
        client.update_weights({})
        client.finish_weight_update()

    send()
    assert calls[-1] == phase  # engines are called no more
    with pytest.raises(TransferBrokenError, match="r1 was lost"):
        client.raise_failure()
    fails.clear()
    calls.clear()
    send()
    client.raise_failure()
    assert calls == ["start", "update", "update", "finish"]
