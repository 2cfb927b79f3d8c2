"""Two ranks that share each row (Ulysses), on gloo, compared with plain torch."""

import pytest
import ranks
import torch
from rank_processes import run_ranks
from test_policy import expected_advantages
from transformers import AutoModelForCausalLM

from raylight.quickstart import STARTER_MODEL


@pytest.mark.slow("`test_ranks_and_packing_do_not_change_the_update` shows it")
@pytest.mark.parametrize("micro_batch", [9, 16384])
def test_ranks_that_share_each_row_compute_as_plain_torch(micro_batch: int) -> None:
    """The second update has the weights of the first one."""
    config = {"packed": True, "ulysses": 2, "max_tokens_per_micro_batch": micro_batch}
    first, second = run_ranks(ranks.main, 2, config)[0]
    assert max(update["mismatch/logprob_abs_max"] for update in (first, second)) < 1e-5
    assert second["probe/difference"] < 1e-5

    plain = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    logprobs = ranks.plain_logprobs(plain)
    batch = ranks.make_batch([values.tolist() for values in logprobs])
    terms = [-(p - p.detach()).exp() * a for p, a in zip(logprobs, expected_advantages(batch), strict=True)]
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    assert first["learner/pg_loss"] == pytest.approx(float(loss), abs=1e-5)
    assert first["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
