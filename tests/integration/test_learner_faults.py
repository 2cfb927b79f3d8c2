"""Learners that die, hang or run out of memory on a real cluster raise a typed error and are restarted."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from answer_rows import answer_row

from raylight.config import LearnerConfig
from raylight.errors import LearnerError, LearnerLostError, LearnerMemoryError, PlacementError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.ranks.actor import LearnerActor
from raylight.learner.ranks.group import LearnerGroup, bundles
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.ray_session.connection import reserve

SETTINGS = PolicySettings(lr=1e-3, max_logprob_mismatch=1e9)
LIMIT_S = 30.0


def make_batch(answer: int = 4) -> TrainBatch:
    """Return four rollouts in two groups, with `answer` response tokens each."""
    prompt = [258, 84, 82, 68]
    rows = [answer_row(str(i), prompt, [20 + i] * answer, [-5.0] * answer) for i in range(4)]
    return TrainBatch([1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b"], rows, [0, 1, 2, 3])


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


@pytest.fixture
def connected(cluster: Any) -> Iterator[None]:
    import ray

    with ray.init(address=cluster.address, log_to_driver=False):
        yield
    cluster.assert_clean()


@contextlib.asynccontextmanager
async def gang(config: LearnerConfig, actor: type = LearnerActor) -> AsyncIterator[LearnerGroup]:
    from ray.util.placement_group import remove_placement_group

    placement = await reserve("gang", bundles(config), config.strategy, 30)
    group = LearnerGroup("gang", config, placement, actor)
    try:
        await group.setup(STARTER_MODEL, SETTINGS, 4, 0)
        yield group
    finally:
        group.stop()
        remove_placement_group(placement)


async def call_rank(group: LearnerGroup, rank: int, question: Any) -> Any:
    return await group._actors[rank].__ray_call__.remote(question)


async def pids(group: LearnerGroup) -> list[int]:
    return [await call_rank(group, rank, lambda actor: os.getpid()) for rank in range(len(group._actors))]


async def wait_until_in_collective(group: LearnerGroup, rank: int) -> None:
    """Wait until the rank is inside a collective."""
    end = time.monotonic() + LIMIT_S
    while (
        "torch/distributed" not in (stacks := await group._actors[rank].dump_stacks.remote("update")).summary
    ):
        assert time.monotonic() < end, stacks.text
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_killed_rank_is_reported_in_seconds_and_the_gang_restarts_identically(
    connected: None,
) -> None:
    async with gang(LearnerConfig(n=2)) as group:
        before = await pids(group)
        fresh = await group.update(make_batch())
        os.kill(before[1], signal.SIGSTOP)  # the other rank then waits for it
        update = asyncio.create_task(group.update(make_batch()))
        await wait_until_in_collective(group, 0)
        os.kill(before[1], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(
            LearnerLostError, match=r"learner 1 died: .*See its log with `ray logs actor --id \w+"
        ):
            await update
        assert time.monotonic() - killed < 10
        with pytest.raises(LearnerLostError, match="have failed and were not restarted: learner 1 died"):
            await group.update(make_batch())

        for _ in range(2):  # the second time, no rank was dead before
            await group.restart()
            assert untimed(await group.update(make_batch())) == pytest.approx(untimed(fresh), rel=1e-6)
        after = await pids(group)
        assert not set(before) & set(after)
        assert not any(psutil.pid_exists(pid) for pid in before)


@pytest.mark.slow
async def test_a_hanging_rank_meets_the_deadline_and_all_stacks_are_in_the_log(
    connected: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = tmp_path / "stuck"

    class HangingLearner(LearnerActor):
        def update(self, shards: list[Any]) -> dict[str, float]:
            import threading

            if self._rank == 1 and stuck.exists():
                threading.Event().wait()
            return super().update(shards)

    async with gang(LearnerConfig(n=2, collective_timeout_s=15), HangingLearner) as group:
        await group.update(make_batch())
        stuck.touch()
        started = time.monotonic()
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(LearnerLostError, match="collective_timeout_s") as caught,
        ):
            await group.update(make_batch())
        assert 15 <= time.monotonic() - started < 30
        for part in (
            "2 of 2 learners made no progress in update within 15 s",
            "learner/updates/policy.py",
            "torch/distributed",
            "threading.py",
        ):
            assert part in str(caught.value)
        for logged in (
            "learner 0 after 15 s of waiting for update",
            "learner 1 after 15 s of waiting for update",
            "torch/distributed",
            "Event().wait()",
        ):
            assert logged in caplog.text

        stuck.unlink()
        await group.restart()
        assert (await group.update(make_batch()))["learner/grad_norm"] > 0


@pytest.mark.slow
async def test_a_long_update_of_short_parts_is_no_hang(connected: None) -> None:
    class SlowLearner(LearnerActor):
        def update(self, batch: TrainBatch) -> dict[str, float]:
            import threading

            from raylight.learner.progress import CLOCK

            for _ in range(12):
                threading.Event().wait(1)  # work
                CLOCK.mark()
            return {"parts": 12.0}

    async with gang(LearnerConfig(n=1, collective_timeout_s=5), SlowLearner) as group:
        assert await group.update(make_batch()) == {"parts": 12.0}


@pytest.mark.slow
async def test_a_rank_that_cannot_return_its_stacks_logs_them(connected: None) -> None:
    class BlockingLearner(LearnerActor):
        def update(self, shards: list[Any]) -> dict[str, float]:
            import ctypes

            ctypes.PyDLL(None).sleep(60)  # holds the GIL
            return {}

    async with gang(LearnerConfig(n=1, collective_timeout_s=2), BlockingLearner) as group:
        with pytest.raises(LearnerLostError, match=r"learner 0 does not respond .* see `ray logs actor"):
            await group.update(make_batch())
        from ray.util.state import get_log

        log = "".join(get_log(actor_id=group._actors[0]._actor_id.hex(), suffix="err", tail=200))
        assert "in update" in log


@pytest.mark.slow
async def test_too_little_memory_names_the_three_settings(connected: None) -> None:
    def keep_within(actor: Any) -> None:
        """Limit this process to 300 MB more memory than it uses."""
        import resource

        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))

    async with gang(LearnerConfig(n=2)) as group:
        await group.update(make_batch())
        await call_rank(group, 1, keep_within)
        with pytest.raises(LearnerMemoryError, match="learner 1 ran out of memory") as caught:
            await group.update(make_batch(answer=12_000))
        for setting in (
            "max_tokens_per_micro_batch (16384 now)",
            "gradient_checkpointing (False now)",
            "lora",
        ):
            assert setting in str(caught.value)
        assert not isinstance(caught.value, LearnerLostError)
        await group.restart()
        assert (await group.update(make_batch()))["learner/grad_norm"] > 0


@pytest.mark.slow
async def test_an_error_in_code_causes_no_restart(connected: None) -> None:
    class Broken(LearnerActor):
        def update(self, shards: list[Any]) -> dict[str, float]:
            raise ZeroDivisionError("no more")

    async with gang(LearnerConfig(n=1), Broken) as group:
        with pytest.raises(LearnerError, match=r"learner 0 failed: ZeroDivisionError\('no more'\)") as caught:
            await group.update(make_batch())
        assert type(caught.value) is LearnerError


@pytest.mark.parametrize(
    ("learners", "cpus", "strategy", "message"),
    [
        (2, 0.5, "STRICT_SPREAD", r"2 x 0.5 CPU \(STRICT_SPREAD\).*each on its own node.*1 node"),
        pytest.param(
            3, 1, "STRICT_PACK", r"3 x 1 CPU \(STRICT_PACK\).*all on one node.*2 CPU", marks=pytest.mark.slow
        ),
        pytest.param(3, 1, "SPREAD", r"3 x 1 CPU \(SPREAD\)", marks=pytest.mark.slow),
    ],
)
def test_an_impossible_placement_is_reported_with_the_reason(
    connected: None, learners: int, cpus: float, strategy: Any, message: str
) -> None:
    config = LearnerConfig(n=learners, num_cpus=cpus, strategy=strategy)
    with pytest.raises(PlacementError, match=message):
        asyncio.run(reserve("gang", bundles(config), config.strategy, 1))
