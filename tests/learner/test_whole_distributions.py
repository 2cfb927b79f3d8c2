"""Distillation from teachers on the learners' ranks, against a plain loss over all logits."""

from pathlib import Path

import pytest
import torch
from distillation_ranks import (
    KINDS,
    main,
    plain_divergence,
    plain_update,
    save_teacher,
    sent_tops,
    settings_of,
    update,
)
from rank_processes import run_ranks

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.learner.losses.distillation import Distiller
from raylight.learner.losses.divergence import TopDivergence
from raylight.learner.tokens import token_logprobs as chunks
from raylight.quickstart import STARTER_MODEL

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


def check(found, wanted, metrics, loss):
    assert metrics["learner/divergence"] == pytest.approx(loss, abs=1e-5)
    assert set(found) == set(wanted)
    for name, grad in wanted.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "chunk"),
    [
        pytest.param(None, 1, id="whole-token-by-token"),
        pytest.param(5, 2**26, id="top-5-one-chunk", marks=pytest.mark.slow("engines' tops show it")),
        pytest.param(None, 2**26, id="whole-one-chunk", marks=pytest.mark.slow),
        pytest.param(5, 1, id="top-5-token-by-token", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_all_logits(kind, top_k, chunk, teacher, monkeypatch):
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", chunk)
    loss, wanted = plain_update(kind, top_k, teacher)
    metrics, found = update(settings_of(kind, top_k, teacher), max_tokens_per_micro_batch=64)
    check(found, wanted, metrics, loss)
    assert metrics["learner/pg_loss"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_most_probable_tokens_have_the_same_loss(kind, teacher):
    """The teacher's additional ids count among its other tokens."""
    loss, wanted = plain_update(kind, 5, teacher)
    metrics, found = update(settings_of(kind, 5), tops=sent_tops(teacher, 5))
    check(found, wanted, metrics, loss)


def test_each_row_has_its_own_teacher(teacher, tmp_path: Path):
    """Teachers of two sizes, one of which scores no row in some micro-batches."""
    other = save_teacher(tmp_path, hidden_size=32, tie_word_embeddings=True)
    numbers = [0, 0, 0, 1, 0, 1, 1, 0]
    loss, wanted = plain_update("js", None, teacher, other, numbers=numbers)
    settings = settings_of("js", None, teacher, other)
    metrics, found = update(settings, numbers=numbers, max_tokens_per_micro_batch=48)
    check(found, wanted, metrics, loss)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_the_student_lacks_are_among_the_others(kind, place):
    """They may be the teacher's most probable ids."""
    logits, ids, probs = torch.arange(5.0)[None], [7, 9], [0.4, 0.3]
    ids.insert(place, 2)
    probs.insert(place, 0.2)
    found = TopDivergence(kind, 0.3, torch.tensor([ids]), torch.tensor([probs]).log())
    own = logits.softmax(-1)[:, 2]
    p, q = torch.tensor([[0.2, 0.8]]), torch.stack([own, 1 - own], -1)
    torch.testing.assert_close(found(logits, slice(0, 1)), plain_divergence(p, q, kind, 0.3))


def test_rows_without_a_teachers_distributions_are_an_error():
    with pytest.raises(ConfigError, match="was given rows without distributions of a teacher"):
        update(settings_of("js", 5))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "top_k"), [("js", None), ("reverse_kl", 5)])
def test_two_ranks_compute_the_same(kind, top_k, teacher):
    loss, wanted = plain_update(kind, top_k, teacher)
    results = run_ranks(main, 2, kind, top_k, teacher)
    assert results[0][0] == results[1][0]
    check(results[0][1], wanted, results[0][0], loss)


def test_packed_rows_have_the_same_loss(teacher):
    loss, wanted = plain_update("forward_kl", None, teacher)
    metrics, found = update(settings_of("forward_kl", None, teacher), packed=True)
    check(found, wanted, metrics, loss)


def test_a_student_equal_to_its_teacher_has_no_divergence():
    metrics, found = update(settings_of("js", None, STARTER_MODEL))
    assert metrics["learner/divergence"] == pytest.approx(0, abs=1e-6)
    assert max(float(grad.abs().max()) for grad in found.values()) < 1e-6


def test_rewards_are_added(teacher):
    _, alone = update(settings_of("reverse_kl", None, teacher))
    metrics, both = update(settings_of("reverse_kl", None, teacher, reward_coef=0.5))
    assert metrics["learner/pg_loss"] != 0
    assert any(not torch.allclose(both[name], alone[name], atol=1e-5) for name in alone)


def test_sequences_that_ranks_share_are_refused(teacher):
    with pytest.raises(ConfigError, match=r"divergence='js' cannot be computed with learner\.ulysses=2"):
        Distiller(settings_of("js", None, teacher), LearnerConfig(n=2, ulysses=2, packed=True))
