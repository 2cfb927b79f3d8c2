"""Hundreds of mutated requests against a real server, or thousands; `python tests/fuzz` sends 100,000."""

from collections.abc import Iterator

import pytest
from engine_server import build_tiny
from fuzz_run import FuzzRun, FuzzServer, StoreTarget
from mutations import SAMPLING_PATHS, Mutator

SEED = 13
MAX_GROWTH_MB = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzServer]:
    server = FuzzServer("transformers", build_tiny(tmp_path_factory.mktemp("fuzz")))
    yield server
    server.close()


@pytest.mark.parametrize("count", [200, pytest.param(4_000, marks=pytest.mark.slow)])
async def test_no_request_fails_the_server_or_harms_another(server: FuzzServer, count: int) -> None:
    counts = await FuzzRun(StoreTarget(server), SEED, count).run()
    assert sum(counts.by_route.values()) == count
    assert counts.canaries >= count // 40
    assert counts.calls > count // 20
    assert {(path, 200) for path in SAMPLING_PATHS} <= counts.by_route.keys()
    assert counts.rss_mb[-1] - counts.rss_mb[0] < MAX_GROWTH_MB


def test_a_number_of_a_seed_is_always_the_same_request() -> None:
    first, again, other = Mutator(1), Mutator(1), Mutator(2)
    assert [first.case(n) for n in range(50)] == [again.case(n) for n in reversed(range(50))][::-1]
    assert first.case(3) != other.case(3)
