"""A killed trainer is started again. Clients fail with the state to continue from, and continue."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_server import KEY, NAME
from ray_cluster import CLUSTER_VARIABLE, DEADLINE_S, SESSION, eventually, processes_with
from sdk_examples import example
from serve_command import serve
from tiny_models import build_model

SHARED = {CLUSTER_VARIABLE: "tinker-trainer-death"}
EXAMPLES = [example(list(b"a="), list(b"xyz")), example(list(b"bb="), list(b"uvw"))]


def trainer() -> psutil.Process:
    """Return the trainer's process."""
    found = []
    for process in processes_with({**SESSION, **SHARED}):
        if "ray::TrainerActor" in " ".join(process.cmdline()):
            found.append(process)
    (process,) = found
    return process


def train(client: Any) -> list[float]:
    """Take two steps; return the losses."""
    from tinker import types

    losses = []
    for _ in range(2):
        passed = client.forward_backward(EXAMPLES, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def assert_lost(call: Any, state: str) -> None:
    """Assert that a call fails, and that its error names the state to continue from."""
    import tinker

    with pytest.raises((tinker.RequestFailedError, tinker.NotFoundError)) as caught:
        call.result(timeout=DEADLINE_S)
    assert "the trainer has died" in str(caught.value)
    assert f"continue from its last saved state, {state}" in str(caught.value)


def test_tenants_continue_from_their_states_after_the_trainer_is_killed(tmp_path: Path) -> None:
    import tinker
    from tinker import types

    model = build_model("qwen3", tmp_path / "model", initializer_range=0.3)
    options = ["--model", model, "--name", NAME, "--port", "0", "--api-key", KEY, "--engine=transformers"]
    options += ["--max-models", "3", "--output-dir", str(tmp_path / "states")]
    with serve(*options, env=SHARED, command="tinker") as server:
        services = [tinker.ServiceClient(base_url=server.url, api_key=KEY) for _ in range(2)]
        clients = [
            service.create_lora_training_client(NAME, rank=rank, seed=0).result()
            for service, rank in zip(services, (2, 4), strict=True)
        ]
        for client in clients:
            train(client)
        states = [client.save_state("early").result().path for client in clients]
        states[0] = clients[0].save_state("late").result().path
        expected = [train(client) for client in clients]
        sampler = clients[0].save_weights_and_get_sampling_client().result()
        first = trainer()
        many = [client.forward_backward(EXAMPLES * 60, "cross_entropy") for client in clients * 20]
        many[0].result()
        first.kill()
        killed = time.monotonic()
        for client, state, last in zip(clients, states, many[-2:], strict=True):
            assert_lost(last, state)
            assert_lost(client.optim_step(types.AdamParams()), state)
        assert time.monotonic() - killed < DEADLINE_S
        (sampled,) = (
            sampler.sample(types.ModelInput.from_ints([97]), 1, types.SamplingParams(max_tokens=2))
            .result()
            .sequences
        )
        assert len(sampled.tokens) > 0
        resumed = [
            service.create_training_client_from_state_with_optimizer(state).result()
            for service, state in zip(services, states, strict=True)
        ]
        assert trainer().pid != first.pid
        for client, losses in zip(resumed, expected, strict=True):
            assert train(client) == pytest.approx(losses, rel=1e-5)
        states = [client.save_state("again").result().path for client in resumed]
        trainer().kill()  # while nobody trains
        fresh = services[1].create_lora_training_client(NAME, rank=2).result()
        assert len(train(fresh)) == 2
        assert_lost(resumed[0].forward_backward(EXAMPLES, "cross_entropy"), states[0])
        for service in services:
            service.close("success").result()
    eventually(lambda: not processes_with({**SESSION, **SHARED}), DEADLINE_S, "the end of the server")
