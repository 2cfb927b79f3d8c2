"""`raylight tinker --engine vllm`: the public SDK trains adapters, and vLLM samples from them.

Skipped without the SDK, unless RAYLIGHT_REQUIRE_TINKER is set.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from serve_command import serve
from tiny_models import build_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("tinker") is None and "RAYLIGHT_REQUIRE_TINKER" not in os.environ,
        reason="pip install 'raylight[tinker]'",
    ),
]
NAME, KEY = "raylight/tiny", "tml-vllm"
PROMPT = list(b"pet=")
RANK = 6
"""No rank of vLLM's own list, as neither is the server's limit."""
TOLERANCE = 1e-3
"""Largest difference of the log-probs of vLLM and the trainer."""


def example(answer: list[int]) -> Any:
    """Return an example of an answer to the prompt."""
    import numpy as np
    from tinker import types

    tokens = [*PROMPT, *answer]
    weights = np.array([0.0] * (len(PROMPT) - 1) + [1.0] * len(answer), np.float32)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def learn(clients: dict[str, Any], steps: int) -> None:
    """Train each client on a word, all at once."""
    from tinker import types

    for _ in range(steps):
        for word, client in clients.items():
            client.forward_backward([example(list(word.encode()))], "cross_entropy")
            client.step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        for client in clients.values():
            client.step.result()


def ask(sampler: Any, count: int = 1, **options: Any) -> Any:
    """Send a request for answers of three tokens."""
    from tinker import types

    params = types.SamplingParams(max_tokens=3, **options)
    return sampler.sample(types.ModelInput.from_ints(PROMPT), count, params)


def greedy(sampler: Any) -> bytes:
    (sequence,) = ask(sampler, temperature=0.0).result().sequences
    return bytes(token % 256 for token in sequence.tokens)


def check_logprobs(sampler: Any, client: Any) -> None:
    """Check that vLLM's log-probs of sampled tokens and of prompts match the trainer's."""
    from tinker import types

    sequences = ask(sampler, count=4, seed=1, temperature=1.0).result().sequences
    passed = client.forward([example(list(sequence.tokens)) for sequence in sequences], "cross_entropy")
    for sequence, output in zip(sequences, passed.result().loss_fn_outputs, strict=True):
        expected = output["logprobs"].tolist()
        assert sequence.logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)
        prompt = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
        found = sampler.compute_logprobs(prompt).result()
        assert found[1:] == pytest.approx(expected, abs=TOLERANCE)


def test_two_tenants_sample_what_they_learned_from_vllm(tmp_path: Path) -> None:
    """Samplers keep their weights while training continues, and more of them are used than vLLM holds."""
    import tinker

    model = build_model("qwen3", tmp_path / "model", initializer_range=0.3)
    options = ["--model", model, "--name", NAME, "--port", "0", "--api-key", KEY, "--engine", "vllm"]
    options += ["--max-samplers", "2", "--max-rank", "10", "--max-model-len", "256"]
    options += ["--output-dir", str(tmp_path / "states")]
    with serve(*options, command="tinker") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        base = service.create_sampling_client(base_model=NAME).result()
        before = greedy(base)
        clients = {
            word: service.create_lora_training_client(NAME, rank=RANK, seed=0).result()
            for word in ("cat", "dog")
        }
        learn(clients, 25)
        samplers = {word: c.save_weights_and_get_sampling_client().result() for word, c in clients.items()}
        calls = {word: ask(sampler, count=8, temperature=0.0) for word, sampler in samplers.items()}
        for word, call in calls.items():  # both adapters sample at once
            assert {bytes(sequence.tokens) for sequence in call.result().sequences} == {word.encode()}
            check_logprobs(samplers[word], clients[word])
        learn({"owl": clients["cat"]}, 25)
        path = clients["cat"].save_weights_for_sampler("owl").result().path
        samplers["owl"] = service.create_sampling_client(model_path=path).result()
        check_logprobs(samplers["owl"], clients["cat"])
        assert {word: greedy(sampler) for word, sampler in samplers.items()} == {
            word: word.encode() for word in samplers
        }
        assert greedy(base) == before
        assert before not in (b"cat", b"dog", b"owl")
        service.close("success").result()
