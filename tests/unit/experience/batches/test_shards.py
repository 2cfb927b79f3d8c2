"""Shards of a batch: each row goes to one rank for each kind of mini-batch, whole and unchanged."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import (
    BatchShard,
    MinibatchShard,
    balance,
    shard_batch,
    split_minibatches,
)
from raylight.experience.settings.policy_settings import CriticSettings, PolicySettings
from raylight.experience.trajectories.reward_rules import TurnReward
from raylight.types import PlacedImage, Trajectory


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    rollouts = draw(st.integers(1, 6))
    owners = [owner for owner in range(rollouts) for _ in range(draw(st.integers(0, 3)))] or [0]
    numbers = iter(range(10_000))

    def row() -> Trajectory:
        prompt, answer = draw(st.integers(1, 4)), draw(st.integers(0, 6))
        mask = [0] * prompt + [1] + [draw(st.integers(0, 1)) for _ in range(answer)]
        ids = [next(numbers) for _ in mask]
        versions = [i % 7 if m else -1 for i, m in zip(ids, mask, strict=True)]
        return Trajectory(
            f"r{ids[0]}",
            ids,
            mask,
            [-0.5 * i * m for i, m in zip(ids, mask, strict=True)],
            versions,
            images=tuple(
                PlacedImage(draw(st.sampled_from("abc")) * 64, place, place + 1)
                for place in range(draw(st.integers(0, prompt)))
            ),
        )

    rows = [row() for _ in owners]
    files = {name * 64: name.encode() for name in "abc"}
    return TrainBatch([float(i) for i in range(rollouts)], ["g"] * rollouts, rows, owners, image_files=files)


def settings_of(parts: int, critic_parts: int | None) -> PolicySettings:
    if critic_parts is None:
        return PolicySettings(mini_batches=parts)
    critic = CriticSettings(mini_batches=critic_parts)
    return PolicySettings(adv_estimator="gae", mini_batches=parts, critic=critic)


def rows_of(shard: BatchShard) -> dict[int, Trajectory]:
    """Unpack the rows of a shard, by index in the batch."""
    packed, found, start, answer = shard.rows, {}, 0, 0
    for place, index in enumerate(packed.indices):
        prompt, length = packed.prompt_lengths[place], packed.response_lengths[place]
        response = slice(answer, answer + length)
        observed = np.zeros(prompt)
        found[index] = Trajectory(
            "",
            packed.token_ids[start : start + prompt + length],
            np.concatenate([observed, packed.mask[response]]),
            np.concatenate([observed, packed.logprobs[response]]),
            np.concatenate([observed - 1, packed.weight_versions[response]]),
            packed.temperatures[place],
            images=packed.images[place],
        )
        start, answer = start + prompt + length, answer + length
    assert (start, answer) == (len(packed.token_ids), len(packed.mask))
    return found


@given(batches(), st.integers(1, 5), st.integers(1, 4), st.none() | st.integers(1, 4))
def test_every_row_is_trained_once_unchanged_and_on_one_rank(
    batch: TrainBatch, ranks: int, parts: int, critic_parts: int | None
) -> None:
    shards = list(shard_batch(batch, settings_of(parts, critic_parts), ranks))
    assert len(shards) == ranks
    for minibatches in ([s.minibatches for s in shards], [s.critic_minibatches for s in shards]):
        found = [index for rank in minibatches for part in rank if not part.is_padding for index in part.rows]
        assert sorted(found) == (list(range(len(batch.rows))) if minibatches[0] else [])
        for of_ranks in zip(*minibatches, strict=True):  # one mini-batch on all ranks
            rows = {index for part in of_ranks for index in part.rows}
            assert {part.rollouts for part in of_ranks} == {len({batch.owners[index] for index in rows})}
            assert all(part.rows for part in of_ranks)
    for shard in shards:
        rows = rows_of(shard)
        named = {i for part in [*shard.minibatches, *shard.critic_minibatches] for i in part.rows}
        assert set(rows) == named, "a rank receives the rows that it trains, and no others"
        for index, row in rows.items():
            sent = batch.rows[index]
            for name in ("token_ids", "mask", "logprobs", "weight_versions", "temperature"):
                assert np.array_equal(getattr(row, name), getattr(sent, name)), name
            assert row.images == sent.images
        digests = {image.sha256 for row in rows.values() for image in row.images}
        assert shard.image_files == {sha256: batch.image_files[sha256] for sha256 in digests}


@given(batches(), st.integers(1, 4))
def test_the_rows_of_a_rollout_stay_in_one_mini_batch(batch: TrainBatch, parts: int) -> None:
    split = split_minibatches(batch.owners, parts)
    assert sorted(index for part in split for index in part) == list(range(len(batch.rows)))
    owners = [{batch.owners[index] for index in part} for part in split]
    assert sum(map(len, owners)) == len(set(batch.owners))
    assert max(map(len, owners)) - min(map(len, owners)) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_ranks_have_nearly_equally_many_tokens(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for i in share) for share in balance(range(len(lengths)), lengths, ranks)]
    # Graham's bound: the last row that the longest share got was put on the shortest one
    assert max(loads) <= sum(lengths) / ranks + max(lengths)
    if len(lengths) >= ranks:
        assert min(loads) > 0


def test_with_fewer_rows_than_ranks_the_rest_get_the_shortest_one_as_padding() -> None:
    rows = [Trajectory("r", range(n), [0] + [1] * (n - 1), [0.0] * n, [0] * n) for n in (5, 3)]
    batch = TrainBatch([1.0, 0.0], ["g", "g"], rows, [0, 1])
    shards = [shard.minibatches for shard in shard_batch(batch, PolicySettings(), 3)]
    assert shards == [
        [MinibatchShard([0], 2)],
        [MinibatchShard([1], 2)],
        [MinibatchShard([1], 2, is_padding=True)],
    ]


def test_turn_rewards_are_placed_on_sampled_tokens_of_the_rollout() -> None:
    rows = [
        Trajectory("r", range(6), [0, 0, 1, 0, 0, 1], [0.0] * 6, [-1] * 6),
        Trajectory("r", range(3), [0, 1, 1], [0.0] * 3, [-1] * 3),
    ]
    turns = [TurnReward(1.0, 0, 0, 4), TurnReward(2.0, 0, 1, 1), TurnReward(3.0, 0, None, 0)]
    batch = TrainBatch([0.0, 0.0], ["a", "a"], rows, [0, 0], [*turns, TurnReward(4.0, 1, None, 9)])
    (shard,) = shard_batch(batch, PolicySettings(), 1)
    places = [(turn.rollout, turn.position, turn.value) for turn in shard.outline.turn_rewards]
    assert places == [(0, 0, 1.0), (0, 2, 2.0), (0, 3, 3.0), (1, 0, 4.0)]
    assert shard.outline.starts.tolist() == [0, 2]
    assert shard.outline.sampled_of_rollouts.tolist() == [4, 0]


def test_a_shard_costs_its_own_tokens_only() -> None:
    n = 10_000
    rows = [Trajectory("r", range(n), [0] + [1] * (n - 1), np.zeros(n), np.zeros(n)) for _ in range(8)]
    batch = TrainBatch([float(i % 2) for i in range(8)], ["g"] * 8, rows, list(range(8)))
    sizes = [len(pickle.dumps(shard)) for shard in shard_batch(batch, PolicySettings(), 4)]
    assert max(sizes) < 2 * n * (4 + 1 + 4 + 8) + 3_000
