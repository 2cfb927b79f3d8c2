"""The public SDK against `raylight tinker`: training, sampling, checkpoints, tenants, errors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from local_server import KEY, NAME
from sdk_examples import example

from raylight.quickstart import STARTER_MODEL


@pytest.fixture
def service(url: str) -> Iterator[Any]:
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    yield client
    client.close("success").result()


def supervised(text: str, answer: str) -> Any:
    return example(list(text.encode()), list(answer.encode()))


def train(client: Any, examples: list[Any], steps: int) -> list[float]:
    """Train on examples; return the losses."""
    from tinker import types

    losses = []
    for _ in range(steps):
        passed = client.forward_backward(examples, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    return losses


def answer_of(sampler: Any, text: str, tokens: int = 3) -> str:
    from tinker import types

    prompt = types.ModelInput.from_ints(list(text.encode()))
    params = types.SamplingParams(max_tokens=tokens, temperature=0.0)
    (sequence,) = sampler.sample(prompt, 1, params).result().sequences
    assert len(sequence.logprobs) == len(sequence.tokens)
    return bytes(token for token in sequence.tokens if token < 256).decode("utf-8", "replace")


def test_two_tenants_learn_different_things_at_once(service: Any, url: str) -> None:
    import tinker

    other = tinker.ServiceClient(base_url=url, api_key=KEY)
    first = service.create_lora_training_client(NAME, rank=8, seed=0).result()
    second = other.create_lora_training_client(NAME, rank=4, seed=1).result()
    wanted = {first: "cat", second: "dog"}
    for client, word in wanted.items():
        client.examples = [supervised("pet=", word)]
    for _ in range(25):  # all requests of both are sent before any result is awaited
        calls = [
            (client.forward_backward(client.examples, "cross_entropy"), client.optim_step(adam()))
            for client in wanted
        ]
        results = [(passed.result(), stepped.result()) for passed, stepped in calls]
    assert all(passed.metrics["loss:sum"] < 0.5 for passed, _ in results)
    for client, word in wanted.items():
        assert answer_of(client.save_weights_and_get_sampling_client().result(), "pet=") == word
    base = service.create_sampling_client(base_model=NAME).result()
    assert answer_of(base, "pet=") not in wanted.values()
    other.close("success").result()


def adam() -> Any:
    from tinker import types

    return types.AdamParams(learning_rate=1e-2)


def test_the_log_probs_of_sampling_and_of_training_agree(service: Any) -> None:
    """The trainer's log-probs of sampled tokens equal the engine's, after an update."""
    from tinker import types

    client = service.create_lora_training_client(NAME, rank=4).result()
    train(client, [supervised("12+30=", "42")], 3)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(b"12+30="))
    response = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=8, seed=5)).result()
    assert len(response.sequences) == 4
    for sequence in response.sequences:
        ids = [*prompt.to_ints(), *sequence.tokens]
        zeros = np.zeros(len(ids) - 1, np.float32)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": np.array(ids[1:]), "weights": zeros},
        )
        output = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        assert output[prompt.length - 1 :] == pytest.approx(sequence.logprobs, abs=1e-4)
        assert sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:] == pytest.approx(
            output, abs=1e-4
        )


def test_training_continues_from_a_saved_state(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=4, train_mlp=False).result()
    examples = [supervised("a=", "xyz"), supervised("bb=", "uvw")]
    train(client, examples, 3)
    path = client.save_state("three").result().path
    assert path == f"tinker://{client.model_id}/weights/three"
    expected = train(client, examples, 3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().lora_rank == 4
    assert train(resumed, examples, 3) == pytest.approx(expected, rel=1e-5)
    fresh = service.create_training_client_from_state(path).result()
    assert train(fresh, examples, 3)[1] != pytest.approx(expected[1], rel=1e-3)


def test_checkpoints_are_listed_sampled_from_and_deleted(service: Any) -> None:
    client = service.create_lora_training_client(NAME, rank=2).result()
    train(client, [supervised("pet=", "cow")], 25)
    saved = client.save_weights_for_sampler("final").result().path
    rest = service.create_rest_client()
    assert answer_of(service.create_sampling_client(model_path=saved).result(), "pet=") == "cow"
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [saved]
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.last_sampler_checkpoint.tinker_path) == (NAME, 2, saved)
    rest.delete_checkpoint_from_tinker_path(saved).result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_a_custom_loss_trains(service: Any) -> None:
    import torch

    client = service.create_lora_training_client(NAME, rank=2, seed=0).result()

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = torch.stack([values[-3:].sum() for values in logprobs]).sum()
        return -total, {"total": total.item()}

    totals = []
    for _ in range(5):
        result = client.forward_backward_custom([supervised("pet=", "owl")], loss).result()
        totals.append(result.metrics["total"])
        client.optim_step(adam()).result()
    assert totals[-1] > totals[0] + 1


def gspo(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    """Compute Tinker's formula of GSPO in the client."""
    import torch

    losses = []
    for datum, policy in zip(data, logprobs, strict=True):
        inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
        marked = inputs["sequence_ratio_mask"] != 0
        mean = (policy.detach() - inputs["logprobs"])[marked].mean()
        ratio, advantages = torch.exp(mean + policy - policy.detach()), inputs["advantages"]
        losses.append(-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum())
    return torch.stack(losses).sum(), {}


def test_a_loss_of_the_client_equals_that_of_the_server(service: Any) -> None:
    from tinker import types

    draw = np.random.default_rng(0)
    data = []
    for length in (4, 9, 6):
        inputs = {
            "target_tokens": draw.integers(0, 256, length),
            "logprobs": draw.normal(-5.6, 0.3, length).astype(np.float32),
            "advantages": draw.normal(0, 1, length).astype(np.float32),
            "sequence_ratio_mask": (np.arange(length) > 1).astype(np.float32),
        }
        tokens = types.ModelInput.from_ints(draw.integers(0, 256, length).tolist())
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    results: list[float] = []
    for custom in (True, False):
        client = service.create_lora_training_client(NAME, rank=2, seed=0).result()
        for _ in range(2):
            passed = (
                client.forward_backward_custom(data, gspo)
                if custom
                else client.forward_backward(data, "gspo")
            ).result()
            norm = client.optim_step(adam()).result().metrics["grad_norm"]
            results += [passed.metrics["loss:sum"], norm]
    assert results[:4] == pytest.approx(results[4:], rel=1e-4)
    assert results[0] != pytest.approx(results[2], rel=1e-3)


def weighted(tokens: Any, targets: np.ndarray) -> Any:
    from tinker import types

    inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    return types.Datum(model_input=tokens, loss_fn_inputs=inputs)


def test_errors_are_typed_and_lose_nothing(service: Any) -> None:
    """A rejected call does not hold up the next one, nor change the gradient."""
    import tinker
    from tinker import types

    client = service.create_lora_training_client(NAME, rank=2, seed=0).result()
    good = supervised("pet=", "cat")
    first = client.forward_backward([good], "cross_entropy").result().metrics["loss:sum"]
    tokens = types.ModelInput.from_ints([1, 2, 3])
    bad: list[tuple[str, Any, str]] = [
        ("sft", good, "there is no loss 'sft'"),
        (
            "cross_entropy",
            types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": np.arange(3)}),
            "needs weights",
        ),
        ("cross_entropy", weighted(tokens, np.arange(4)), "4 values for 3 tokens"),
        ("cross_entropy", weighted(tokens, np.arange(3) + 400), "400 is not a token id"),
    ]
    for loss, datum, message in bad:
        with pytest.raises(tinker.BadRequestError, match=message):
            client.forward_backward([datum], loss).result()
    assert client.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] == first
    client.optim_step(adam()).result()
    with pytest.raises(tinker.RequestFailedError, match="call forward_backward first"):
        client.optim_step(adam()).result()
    with pytest.raises(tinker.BadRequestError, match="has no model 'other'"):
        service.create_lora_training_client("other").result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.load_state("tinker://x/weights/y").result()
    with pytest.raises(tinker.BadRequestError, match="is not of the form"):
        service.create_sampling_client(model_path="tinker://x").result()
    assert client.forward_backward([good], "cross_entropy").result().metrics["loss:sum"] < first


def test_a_wrong_key_is_refused(url: str) -> None:
    import tinker

    with pytest.raises(tinker.AuthenticationError, match="API key"):
        tinker.ServiceClient(base_url=url, api_key="tml-wrong").create_lora_training_client(NAME).result()


def test_a_stop_token_and_a_stop_text_end_a_response(service: Any) -> None:
    from tinker import types
    from transformers import AutoTokenizer

    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(list(b"12+30="))
    greedy = {"temperature": 0.0, "max_tokens": 8}
    whole = sampler.sample(prompt, 1, types.SamplingParams(**greedy)).result().sequences[0].tokens
    texts = AutoTokenizer.from_pretrained(STARTER_MODEL).batch_decode([[token] for token in whole])
    place = next(i for i, text in enumerate(texts) if text.strip() and text.isascii() and text.isprintable())
    for stop in ([whole[place]], [texts[place]]):
        params = types.SamplingParams(**greedy, stop=stop)
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        end = list(whole).index(whole[place]) + 1
        assert (list(sequence.tokens), sequence.stop_reason) == (list(whole[:end]), "stop")


def test_the_server_describes_itself(service: Any) -> None:
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == (NAME, 512)
