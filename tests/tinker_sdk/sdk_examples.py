"""Training examples of the SDK."""

from typing import Any

import numpy as np


def example(prompt: list[int], response: list[int]) -> Any:
    """Return an example of a response to a prompt, both as tokens."""
    from tinker import types

    ids = [*prompt, *response]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(response)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": np.array(ids[1:]), "weights": np.array(weights, np.float32)},
    )
