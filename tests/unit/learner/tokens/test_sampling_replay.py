"""Penalties and truncation in a learner's log-probs equal a hand-written reference, and so do gradients."""

import itertools
from typing import Any

import pytest
import torch

from raylight.learner.tokens import token_logprobs as token_logprobs_module
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import TrainRow
from raylight.learner.tokens.token_logprobs import squared_probs, token_logprobs
from raylight.types import PenalisedRange, Penalties, TokenSets

VOCABULARY = 40
PENALTIES = Penalties(repetition=1.3, presence=0.4, frequency=-0.2)


def make_rows() -> list[TrainRow]:
    """Rows of two calls each; one row penalises its second call, another its first."""
    torch.manual_seed(0)
    found = []
    for number, (prompt, mask) in enumerate([(3, [1, 1, 1, 0, 0, 1, 1, 1, 1]), (4, [1, 1, 1, 1]), (2, [1])]):
        response, zeros = torch.randint(0, 8, (len(mask),)), torch.zeros(len(mask))
        allowed = (
            torch.rand(len(mask), VOCABULARY)
            < torch.tensor([0.02, 0.6, 1.0])[torch.arange(len(mask)) % 3, None]
        )
        allowed[torch.arange(len(mask)), response] = True
        row = TrainRow(
            number,
            number,
            torch.randint(0, 8, (prompt,)),
            response,
            torch.tensor(mask),
            zeros,
            zeros.long(),
            (1.0, 0.7, 1.5)[number],
        )
        row.candidates = None if number == 2 else TokenSets.from_mask(allowed.numpy())
        row.penalised = {
            0: (PenalisedRange(8, 12, PENALTIES),),
            1: (PenalisedRange(4, 8, Penalties(frequency=0.3)),),
        }.get(number, ())
        row.allowed = allowed  # type: ignore[attr-defined]
        found.append(row)
    found[0].mask[6] = 0  # a gap within a call, as of a stale token
    return found


def reference(head: Any, hidden: torch.Tensor, rows: list[TrainRow]) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and sums of squares, token by token."""
    logprobs, entropies, squares = [], [], []
    states = iter(hidden)
    for row in rows:
        ids = [*row.prompt.tolist(), *row.response.tolist()]
        for place in row.mask.nonzero()[:, 0].tolist():
            at = place + len(row.prompt)
            logits = list(head(next(states)))
            for start, stop, (repetition, presence, frequency) in row.penalised:
                if start <= at < stop:
                    for token in set(ids[:at]):
                        z = logits[token]
                        logits[token] = z / repetition if z > 0 else z * repetition
                    for token in set(ids[start:at]):
                        count = ids[start:at].count(token)
                        logits[token] = logits[token] - presence - frequency * count
            heated = torch.stack(logits) / row.temperature
            if row.candidates is not None:
                heated = torch.where(row.allowed[place], heated, -torch.inf)  # type: ignore[attr-defined]
            found = heated.log_softmax(-1)
            logprobs.append(found[ids[at]])
            entropies.append(-(found.exp() * found.clamp(min=-1e4)).sum())
            squares.append(found.exp().square().sum())
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(squares)


@pytest.mark.parametrize(("chunk", "block"), list(itertools.product([1, 5, 100], [1, 3, 100])))
def test_values_and_gradients_equal_the_reference(
    chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(token_logprobs_module.BLOCK_LOGITS, "cpu", block * VOCABULARY)
    rows = make_rows()
    targets = MicroBatch(rows, torch.device("cpu"), packed=False, rollouts=3, tokens=1, dp_size=1).targets()
    tokens = len(targets.targets)
    head, hidden = torch.nn.Linear(16, VOCABULARY), torch.randn(tokens, 16, requires_grad=True)
    expected = reference(head, hidden, rows)
    leaves = [hidden, *head.parameters()]
    weights = torch.linspace(-1, 1, tokens)
    wanted = torch.autograd.grad((expected[0] * weights).sum() + (expected[1] * weights**2).sum(), leaves)
    options: dict[str, Any] = {"chunk": chunk, "replay": targets.replay}
    logprobs, entropies, _ = token_logprobs(
        head,
        head.parameters(),
        hidden,
        targets.targets,
        targets.temperatures,
        entropy=True,
        entropy_grad=True,
        **options,
    )
    assert entropies is not None
    torch.testing.assert_close((logprobs, entropies), expected[:2], rtol=1e-5, atol=1e-5)
    squares = squared_probs(head, hidden, targets.temperatures, **options)
    torch.testing.assert_close(squares, expected[2].detach(), rtol=1e-5, atol=1e-5)
    loss = (logprobs * weights).sum() + (entropies * weights**2).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), wanted, rtol=1e-4, atol=1e-5)


def test_a_part_of_the_targets_keeps_their_penalties_and_candidates() -> None:
    targets = MicroBatch(
        make_rows(), torch.device("cpu"), packed=False, rollouts=3, tokens=1, dp_size=1
    ).targets()
    replay, logits = targets.replay, torch.randn(len(targets.targets), VOCABULARY)
    assert replay is not None
    whole = slice(0, len(logits))
    expected = replay.exclude(replay.penalise(logits, whole), whole)
    chosen = torch.tensor([1, 2, 4, 5, 6, 9])
    part, whole = replay.select(chosen.numpy()), slice(0, len(chosen))
    assert torch.equal(part.exclude(part.penalise(logits[chosen], whole), whole), expected[chosen])


def test_rows_without_either_have_no_replay() -> None:
    (row,) = make_rows()[2:]
    assert MicroBatch([row], torch.device("cpu"), False, 1, 1, 1).targets().replay is None
