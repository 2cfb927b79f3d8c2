"""Log-probs by chunks and their gradients equal the full logits'."""

import copy

import pytest
import torch

from raylight.learner.tokens import token_logprobs as token_logprobs_module
from raylight.learner.tokens.token_logprobs import token_logprobs

TOKENS, VOCABULARY = 11, 40


def plain(head, hidden, targets, temperatures):
    logprobs = (head(hidden) / temperatures[:, None]).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.fixture
def case():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCABULARY)
    hidden = torch.randn(TOKENS, 16, requires_grad=True)
    return head, hidden, torch.randint(0, VOCABULARY, (TOKENS,)), torch.linspace(0.5, 1.5, TOKENS)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunks_change_neither_values_nor_gradients(case, chunk, entropy_grad, monkeypatch):
    monkeypatch.setitem(token_logprobs_module.BLOCK_LOGITS, "cpu", 3 * VOCABULARY)
    head, hidden, targets, temperatures = case
    leaves = [hidden, *head.parameters()]
    expected = plain(*case)
    weights = torch.linspace(-1, 1, TOKENS)
    penalty = (expected[1] * weights).sum() if entropy_grad else 0
    wanted = torch.autograd.grad((expected[0] * weights).sum() + penalty, leaves)
    logprobs, entropies, _ = token_logprobs(
        head,
        head.parameters(),
        hidden,
        targets,
        temperatures,
        chunk=chunk,
        entropy=True,
        entropy_grad=entropy_grad,
    )
    torch.testing.assert_close((logprobs, entropies), expected)
    assert entropies.requires_grad == entropy_grad
    loss = (logprobs * weights).sum() + (entropies * weights).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), wanted)


@pytest.mark.parametrize("tokens", [0, 3, TOKENS])
def test_temperatures_of_one_may_be_left_out(case, tokens):
    head, hidden, targets, _ = case
    arguments = (head, head.parameters(), hidden[:tokens], targets[:tokens])
    scaled, *_ = token_logprobs(*arguments, torch.ones(tokens), chunk=4)
    logprobs, entropies, _ = token_logprobs(*arguments, None, chunk=4)
    assert torch.equal(logprobs, scaled)
    assert entropies is None
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_frozen_weights_have_no_gradient(case):
    head, hidden, targets, temperatures = case
    head.requires_grad_(False)
    logprobs, *_ = token_logprobs(head, head.parameters(), hidden, targets, temperatures, chunk=4)
    (found,) = torch.autograd.grad(logprobs.sum(), hidden)
    torch.testing.assert_close(found, torch.autograd.grad(plain(*case)[0].sum(), hidden)[0])


def test_no_more_than_a_chunk_of_logits_is_computed_at_a_time(case):
    head, hidden, targets, temperatures = case
    seen = []

    def counting(part):
        seen.append(len(part))
        return head(part)

    arguments = (counting, head.parameters(), hidden, targets, temperatures)
    token_logprobs(*arguments, chunk=4)[0].sum().backward()
    assert seen == [4, 4, 3, 4, 4]  # the last chunk is kept for the backward pass
    seen.clear()
    token_logprobs(*arguments, chunk=TOKENS)[0].sum().backward()
    assert seen == [TOKENS]
    seen.clear()
    with torch.no_grad():
        token_logprobs(*arguments, chunk=6)
    assert seen == [6, 5]


def test_autocast_holds_in_the_backward_pass(case):
    head, hidden, targets, temperatures = case
    dtypes = []

    def recording(part):
        logits = head(part)
        dtypes.append(logits.dtype)
        return logits

    with torch.autocast("cpu", torch.bfloat16):
        logprobs, *_ = token_logprobs(recording, head.parameters(), hidden, targets, temperatures, chunk=6)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert set(dtypes) == {torch.bfloat16}


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_tokens_of_probability_zero_add_nothing_to_entropy_and_gradient(case, entropy_grad):
    head, hidden, _, temperatures = case
    targets = torch.arange(TOKENS)

    def found(layer):
        logprobs, entropies, _ = token_logprobs(
            layer,
            head.parameters(),
            hidden,
            targets,
            temperatures,
            chunk=4,
            entropy=True,
            entropy_grad=entropy_grad,
        )
        loss = logprobs.sum() + (entropies.sum() if entropy_grad else 0)
        return logprobs, entropies, *torch.autograd.grad(loss, [hidden, *head.parameters()])

    def masked(part):
        logits = head(part)
        return torch.cat([logits[:, :-20], torch.full_like(logits[:, -20:], -torch.inf)], 1)

    values = found(masked)
    assert all(value.isfinite().all() for value in values)
    torch.testing.assert_close(values, found(lambda part: masked(part).clamp(min=-1e6)))


def test_gradients_of_chunks_are_summed_without_the_rounding_of_16_bits() -> None:
    """The error comes from the chunks themselves, however many there are."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, VOCABULARY, bias=False).bfloat16(), torch.randn(512, 16).bfloat16()
    targets = torch.randint(0, VOCABULARY, (512,))

    def gradient(module: torch.nn.Module, states: torch.Tensor, chunk: int) -> torch.Tensor:
        logprobs, *_ = token_logprobs(module, module.parameters(), states, targets, None, chunk=chunk)
        return torch.autograd.grad(logprobs.sum(), list(module.parameters()))[0].float()

    exact = gradient(copy.deepcopy(head).float(), hidden.float(), 512)
    whole, chunked = ((gradient(head, hidden, chunk) - exact).norm() for chunk in (512, 4))
    assert chunked < 1.5 * whole
