"""Every start of a replica gets a new seed, derived from the run's."""

from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.starts import SEED_BITS, SamplingStreams, derive_seed


def test_the_first_replica_has_the_seed_of_the_run() -> None:
    assert [derive_seed(seed, SamplingStreams().name_for("a")) for seed in (0, 7)] == [0, 7]


def test_no_two_starts_of_replicas_share_a_seed() -> None:
    streams = SamplingStreams()
    seeds = {derive_seed(seed, streams.name_for(f"{seed}-{i}")) for seed in range(20) for i in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)


def test_a_seed_depends_on_the_run_and_the_start_alone() -> None:
    assert derive_seed(3, "1") == derive_seed(3, "1") != derive_seed(4, "1")
    assert derive_seed(0, "attempts", 12) != derive_seed(0, "attempts", 1, 2)


async def test_a_repeated_question_gets_the_same_stream_and_a_restarted_replica_another() -> None:
    coordinator = ReplicaCoordinator()
    names = [await coordinator.sampling_stream(replica) for replica in ("a", "b", "a", "restarted a")]
    assert names == ["0", "1", "0", "2"]


async def test_a_restarted_coordinator_repeats_no_stream() -> None:
    restarted = ReplicaCoordinator(restored=False)
    assert await restarted.sampling_stream("c") == "c"
