"""Parity of engines and learner, and the detection of stale engines."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from unit_helpers import within

from raylight.errors import MismatchError
from raylight.trainer.parity import (
    START_TOKENS,
    SYNC_TOKENS,
    ParityMonitor,
    compare,
    probe_ids,
    vocabulary_size,
)

LEARNER = [-1.0, -2.5, -0.25, -7.0]


def test_a_probe_is_always_the_same_and_within_the_vocabulary() -> None:
    assert probe_ids(320, 32) == probe_ids(320, 32)
    assert probe_ids(320, 32)[:16] == probe_ids(320, 16)
    for size in (1, 2, 5, 320, 151_936):
        ids = probe_ids(size, 64)
        assert len(ids) == 64
        assert all(0 <= i < size for i in ids)
    assert len(set(probe_ids(320, 32))) > 16


def test_the_vocabulary_is_in_the_models_folder(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 320}))
    assert vocabulary_size(str(tmp_path)) == 320
    config.write_text(json.dumps({"text_config": {"vocab_size": 99}}))
    assert vocabulary_size(str(tmp_path)) == 99


def test_parity_tells_how_far_apart_they_are() -> None:
    found = compare([-1.0, -2.5, -0.25, -7.004], LEARNER, 2e-3)
    assert found.max_abs == pytest.approx(4e-3)
    assert found.mean_abs == pytest.approx(1e-3)
    assert found.tokens == 4


@pytest.mark.parametrize(
    "engine",
    [
        [-1.0, -2.5, -0.25, -7.1],
        [x - 0.002 for x in LEARNER],
        [-1.0, math.nan, -0.25, -7.0],
        [-1.0, -math.inf, -0.25, -7.0],
    ],
    ids=["one token", "all a little", "not a number", "infinite"],
)
def test_what_differs_too_much_is_an_error(engine: list[float]) -> None:
    with pytest.raises(MismatchError, match=r"differ by .* more than 0\.001.*Compare the dtype"):
        compare(engine, LEARNER, 1e-3)


@pytest.mark.parametrize("engine", [LEARNER[:-1], []])
def test_answers_of_another_length_are_an_error(engine: list[float]) -> None:
    with pytest.raises(MismatchError, match="log-probs of the probe and the learner"):
        compare(engine, LEARNER, 1.0)
    with pytest.raises(MismatchError):
        compare([], [], 1.0)


def test_the_replica_and_the_version_are_named() -> None:
    watch = ParityMonitor(1e-3)
    assert watch.check(
        0, {"a": LEARNER, "b": [x + 1e-4 for x in LEARNER]}, LEARNER
    ).mean_abs == pytest.approx(1e-4)
    with pytest.raises(
        MismatchError, match="weight version 1, replica b: log-probs of engine and learner differ"
    ):
        watch.check(1, {"a": LEARNER, "b": [x - 1 for x in LEARNER]}, LEARNER)
    with pytest.raises(MismatchError, match="no replica returned"):
        watch.check(1, {}, LEARNER)


class Sides:
    """A learner whose log-probs move a little with each version, and an engine that rounds."""

    def __init__(self, noise: float, step: float) -> None:
        self._random, self._noise, self._step = random.Random(0), noise, step
        self.learner = [self._random.uniform(-12, -1) for _ in range(31)]

    def next(self) -> None:
        self.learner = [x + self._random.gauss(0, self._step) for x in self.learner]

    def engine(self, weights: list[float] | None = None) -> dict[str, list[float]]:
        return {"a": [x + self._random.gauss(0, self._noise) for x in weights or self.learner]}


PRECISIONS = [(1e-6, 1e-5, 1e-3), (3e-6, 1e-3, 1e-3), (0.05, 0.03, 0.5), (0.05, 0.4, 0.5)]


@pytest.mark.parametrize(("noise", "step", "tolerance"), PRECISIONS)
def test_an_engine_that_follows_passes_for_ever(noise: float, step: float, tolerance: float) -> None:
    sides, watch = Sides(noise, step), ParityMonitor(tolerance)
    for version in range(1000):
        watch.check(version, sides.engine(), sides.learner)
        sides.next()


@pytest.mark.parametrize(
    ("precision", "found_at"),
    list(zip(PRECISIONS, [2e-4, 2e-3, 0.6, 1.0], strict=True)),
    ids=["tiny", "fp32", "bf16", "large"],
)
def test_an_engine_that_stays_behind_is_found(precision: tuple[float, float, float], found_at: float) -> None:
    """As soon as the learner has moved away so far: in float32, far below the tolerance."""
    noise, step, tolerance = precision
    sides, watch = Sides(noise, step), ParityMonitor(tolerance)
    watch.check(0, sides.engine(), sides.learner)
    stale = sides.learner

    def train() -> None:
        for version in range(1, 2000):
            sides.next()
            watch.check(version, sides.engine(stale), sides.learner)

    with pytest.raises(MismatchError, match=r"lacks some of the weights|differ by"):
        train()
    assert sum(abs(a - b) for a, b in zip(stale, sides.learner, strict=True)) / 31 < found_at


def test_a_shorter_probe_is_compared_with_the_start_of_a_longer_one() -> None:
    watch = ParityMonitor(1e-3)
    watch.check(0, {"a": LEARNER}, LEARNER)
    moved = [x + 1e-3 for x in LEARNER[:2]]
    with pytest.raises(
        MismatchError,
        match=r"replica a lacks some of the weights of version 1: since version 0 .* changed by 0\.001",
    ):
        watch.check(1, {"a": LEARNER[:2]}, moved)
    watch.check(1, {"a": moved}, moved)


# a real engine


@torch.inference_mode()
def logprobs_of(module: Any, ids: list[int]) -> list[float]:
    logits = module(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def step(module: Any, size: float) -> None:
    """As an update of the learner might."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += size * torch.randn_like(parameter)


def export(module: Any) -> dict[str, Any]:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("sent", ["with the tied output layer", "without it"])
async def test_a_tied_output_layer_is_never_stale(make_engine: Any, tied_model: str, sent: str) -> None:
    """An engine that keeps the output layer apart must take the embedding for it, and the parity check sees
    that it did."""
    torch.manual_seed(0)
    engine, learner, watch = (
        make_engine(),
        AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32),
        ParityMonitor(1e-3),
    )
    long, short = (probe_ids(vocabulary_size(tied_model), n) for n in (START_TOKENS, SYNC_TOKENS))
    async with within(30):
        start = watch.check(0, {"a": await engine.logprobs(long)}, logprobs_of(learner, long))
        assert start.max_abs < 1e-4
        for version in (1, 2):
            step(learner, 1e-3)
            weights = export(learner)
            if sent == "without it":
                del weights["lm_head.weight"]
            await engine.load_weights(version, weights)
            parity = watch.check(version, {"a": await engine.logprobs(short)}, logprobs_of(learner, short))
            assert parity.max_abs < 1e-4


@pytest.mark.parametrize("size", [1e-5, 1e-3])
async def test_a_stale_output_layer_is_found_at_the_first_version(
    untied_model: str, make_engine: Any, size: float
) -> None:
    """All weights but the output layer are new, as with vLLM; steps are below the tolerance."""
    torch.manual_seed(0)
    learner = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    engine, watch = make_engine(untied_model), ParityMonitor(0.5)
    stale = export(learner)["lm_head.weight"]
    long, short = (probe_ids(vocabulary_size(untied_model), n) for n in (START_TOKENS, SYNC_TOKENS))
    async with within(30):
        watch.check(0, {"a": await engine.logprobs(long)}, logprobs_of(learner, long))
        step(learner, size)
        await engine.load_weights(1, export(learner) | {"lm_head.weight": stale})
        with pytest.raises(MismatchError, match="a lacks some of the weights of version 1"):
            watch.check(1, {"a": await engine.logprobs(short)}, logprobs_of(learner, short))
