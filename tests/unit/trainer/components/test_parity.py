"""Parity of engines and learner, and the detection of stale engines."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answer_rows import answer_logprobs
from transformers import AutoModelForCausalLM
from unit_helpers import within
from weight_loading import load_weights

from raylight.errors import EngineStartError, MismatchError
from raylight.trainer.components.parity import PROBE_TOKENS, ParityMonitor, compare, make_probe

LEARNER = [-1.0, -2.5, -0.25, -7.0]


def folder_of(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_probe_is_always_the_same_and_within_the_vocabulary(tmp_path: Path) -> None:
    for size in (1, 2, 5, 320, 151_936):
        ids = make_probe(folder_of(tmp_path, vocab_size=size), 4096)
        assert len(ids) == PROBE_TOKENS
        assert all(0 <= i < size for i in ids)
        assert ids == make_probe(str(tmp_path), 4096)
    assert len(set(ids)) > 120
    assert ids != make_probe(str(tmp_path), 4096, seed=1)


def test_a_probe_fits_the_model(tmp_path: Path) -> None:
    nested = folder_of(tmp_path, text_config={"vocab_size": 99, "max_position_embeddings": 64})
    assert len(make_probe(nested, 4096)) == 63
    assert len(make_probe(nested, 8)) == 7
    with pytest.raises(EngineStartError, match="has no vocab_size"):
        make_probe(folder_of(tmp_path), 4096)


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

    def __init__(self, noise: float, step: float, seed: int = 0) -> None:
        self._random, self._noise, self._step = np.random.default_rng(seed), noise, step
        self.exact: list[float] = self._random.uniform(-12, -1, PROBE_TOKENS - 1).tolist()

    def next(self) -> None:
        self.exact = self._random.normal(self.exact, self._step).tolist()

    def rounded(self, exact: list[float] | None = None) -> list[float]:
        return self._random.normal(exact or self.exact, self._noise).tolist()


PRECISIONS = [(1e-6, 1e-5, 1e-3), (3e-6, 1e-3, 1e-3), (0.05, 0.03, 0.3), (0.05, 1e-5, 0.3), (0.05, 0.4, 0.3)]
"""Noise of an engine, size of the learner's steps, and the tolerance."""


@pytest.mark.parametrize("learner_rounds", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("noise", "step", "tolerance"), PRECISIONS)
def test_an_engine_that_follows_passes_for_ever(
    noise: float, step: float, tolerance: float, learner_rounds: bool
) -> None:
    """Small updates and large ones, whether the learner rounds too or not."""
    for seed in range(5):
        sides, watch = Sides(noise, step, seed), ParityMonitor(tolerance)
        for version in range(200):
            watch.check(version, {"a": sides.rounded()}, sides.rounded() if learner_rounds else sides.exact)
            sides.next()


@pytest.mark.parametrize("share", [1.0, 0.3], ids=["all", "the output layer"])
@pytest.mark.parametrize(
    ("precision", "found_at"),
    list(zip(PRECISIONS[:3], [2e-5, 2e-3, 1.0], strict=True)),
    ids=["tiny", "fp32", "bf16"],
)
def test_an_engine_that_drops_updates_is_found(
    precision: tuple[float, float, float], found_at: float, share: float
) -> None:
    """It is found when the learner has moved a few times as far as engines differ anyway: far below the
    tolerance in float32, and far below a nat in half precision."""
    noise, step, tolerance = precision
    sides, watch = Sides(noise, step), ParityMonitor(1e3 * tolerance)
    start = sides.exact

    def engine() -> list[float]:
        stale = [share * a + (1 - share) * b for a, b in zip(start, sides.exact, strict=True)]
        return sides.rounded(stale)

    def train() -> None:
        for version in range(2000):
            watch.check(version, {"a": sides.rounded(), "b": engine()}, sides.exact)
            sides.next()

    with pytest.raises(MismatchError, match="replica b lacks some of the weights"):
        train()
    moved = sum(abs(a - b) for a, b in zip(start, sides.exact, strict=True)) / len(start)
    assert moved < found_at


# a real engine


@torch.inference_mode()
def logprobs_of(module: Any, ids: list[int]) -> list[float]:
    return answer_logprobs(module, ids[:1], ids[1:]).tolist()


def step(module: Any, size: float) -> None:
    """Change the weights as an update of the learner might."""
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
    ids = make_probe(tied_model, 1024)
    async with within(30):
        start = watch.check(0, {"a": await engine.logprobs(ids)}, logprobs_of(learner, ids))
        assert start.max_abs < 1e-4
        for version in (1, 2):
            step(learner, 1e-3)
            weights = export(learner)
            if sent == "without it":
                del weights["lm_head.weight"]
            await load_weights(engine, version, weights)
            parity = watch.check(version, {"a": await engine.logprobs(ids)}, logprobs_of(learner, ids))
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
    ids = make_probe(untied_model, 1024)
    async with within(30):
        watch.check(0, {"a": await engine.logprobs(ids)}, logprobs_of(learner, ids))
        step(learner, size)
        await load_weights(engine, 1, export(learner) | {"lm_head.weight": stale})
        with pytest.raises(MismatchError, match="a lacks some of the weights of version 1"):
            watch.check(1, {"a": await engine.logprobs(ids)}, logprobs_of(learner, ids))


class HalfPrecision:
    """A learner with float32 parameters and an engine, each computing in the precision of a run on GPUs.

    The trained model moves by random steps, as an update of the learner might. The engine reads the same
    parameters in its own data type.
    """

    def __init__(self, path: str, learner: torch.dtype, engine: torch.dtype) -> None:
        self._learner_dtype, self._engine_dtype = learner, engine
        self.parameters = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._learner = AutoModelForCausalLM.from_pretrained(path, dtype=learner)
        # other kernels than the learner's
        self._engine = AutoModelForCausalLM.from_pretrained(path, dtype=engine, attn_implementation="eager")
        self._ids = make_probe(path, 1024)

    def learner(self) -> list[float]:
        self._learner.load_state_dict(self.parameters.state_dict())
        return logprobs_of(self._learner, self._ids)

    def engine(self, lacks: tuple[str, ...] = ()) -> list[float]:
        """Load the parameters except those whose names begin with `lacks`."""
        state = {k: v for k, v in self.parameters.state_dict().items() if not k.startswith(lacks or ("?",))}
        self._engine.load_state_dict(state, strict=False)
        return logprobs_of(self._engine, self._ids)


HALVES = [
    (torch.bfloat16, torch.bfloat16),
    *(
        pytest.param(*dtypes, marks=pytest.mark.slow("both sides in bfloat16 show it"))
        for dtypes in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
    ),
]


@pytest.mark.parametrize(("learner", "engine"), HALVES, ids=str)
@pytest.mark.parametrize(
    "size", [3e-4, *(pytest.param(size, marks=pytest.mark.slow) for size in [1e-7, 2e-3])]
)
def test_half_precision_raises_no_false_alarm(
    untied_model: str, learner: torch.dtype, engine: torch.dtype, size: float
) -> None:
    torch.manual_seed(0)
    run, watch = HalfPrecision(untied_model, learner, engine), ParityMonitor(0.3)
    for version in range(67):
        watch.check(version, {"a": run.engine()}, run.learner())
        step(run.parameters, size)


@pytest.mark.parametrize(("learner", "engine"), HALVES, ids=str)
@pytest.mark.parametrize(
    "lacks", [pytest.param("", marks=pytest.mark.slow), "lm_head."], ids=["all", "the output layer"]
)
def test_an_engine_that_drops_updates_is_found_in_half_precision(
    untied_model: str, learner: torch.dtype, engine: torch.dtype, lacks: str
) -> None:
    torch.manual_seed(0)
    run, watch = HalfPrecision(untied_model, learner, engine), ParityMonitor(1e3)
    start = run.learner()
    watch.check(0, {"a": run.engine()}, start)

    def train() -> None:
        for version in range(1, 200):
            step(run.parameters, 1e-3)
            watch.check(version, {"a": run.engine((lacks,))}, run.learner())

    with pytest.raises(MismatchError, match="lacks some of the weights"):
        train()
    moved = [abs(a - b) for a, b in zip(run.learner(), start, strict=True)]
    assert sum(moved) / len(moved) < 0.5
