"""Every listening socket of a local run with vLLM is known, with one worker and with two."""

from pathlib import Path

import pytest
from listening_sockets import KNOWN, VLLM, sockets_of_run, unknown


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
def test_vllm_listens_on_loopback_only(tmp_path: Path, workers: int) -> None:
    engine = {"kind": "vllm", "num_cpus": 0.5, "args": {"tensor_parallel_size": workers}}
    sockets = sockets_of_run(tmp_path, engine)
    assert unknown(sockets, [*KNOWN, *VLLM]) == []
    assert len(unknown(sockets, VLLM)) < len(sockets)
