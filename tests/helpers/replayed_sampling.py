"""Log-probs of truncated and penalised tokens by plain transformers, token by token."""

from typing import Any

import numpy as np
import torch

from raylight.types import TokenSets


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: list[int], output: list[int], candidates: TokenSets, **sampling: Any
) -> list[float]:
    """Return the log-probs of the tokens of `output`, after penalties, temperature and candidates."""
    every = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    repetition = sampling.get("repetition_penalty", 1.0)
    found = []
    for at, logits in enumerate(every):
        for token in {*prompt, *output[:at]}:
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        for token in set(output[:at]):
            count = output[:at].count(token)
            logits[token] -= (
                sampling.get("presence_penalty", 0) + sampling.get("frequency_penalty", 0) * count
            )
        logits /= sampling.get("temperature", 1.0)
        ids = candidate_ids(candidates[at : at + 1], len(logits))
        found.append(float(logits[output[at]] - logits[ids].logsumexp(0)))
    return found


def candidate_ids(sets: TokenSets, vocabulary: int) -> list[int]:
    """Return the ids of the only set."""
    ids: list[int] = sets.values.tolist()
    if not ids:
        return list(range(vocabulary))
    if ids[0] >= 0:
        return ids
    return np.flatnonzero(np.unpackbits(sets.values[1:].view(np.uint8), bitorder="little")).tolist()
