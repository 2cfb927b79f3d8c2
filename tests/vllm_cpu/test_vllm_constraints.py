"""Records of constrained answers in vLLM: log-probs of the policy alone, and counts of allowed tokens."""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm_helpers import HI, TOLERANCE, change, difference, expected_logprobs, until
from weight_loading import load_weights

from raylight.engines.grammar import MAX_WHITE_SPACE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
PATTERN = r'\{"colour": "(red|green|blue)", "name": "[^"\\\\]{1,6}"\}'
"""JSON without white space."""
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


async def ask(bench: Any, **settings: Any) -> Any:
    return await bench.openai.chat.completions.create(
        model="policy", messages=HI, **{"max_tokens": 300, **settings}
    )


def policy_difference(model: Any, sample: Any, temperature: float = 1.0) -> torch.Tensor:
    assert len(sample.policy_logprobs) == len(sample.allowed) == len(sample.output_ids) > 0
    expected = expected_logprobs(model, sample.prompt_ids.tolist(), sample.output_ids, temperature)
    return (torch.tensor(sample.policy_logprobs) - expected).abs()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_a_schemas_tokens_have_the_logprobs_of_the_policy(bench: Any, temperature: float) -> None:
    await ask(bench, response_format=FORMAT, temperature=temperature)
    sample = bench.sample
    assert policy_difference(bench.reference(), sample, temperature or 1.0).max() < TOLERANCE
    assert sample.allowed[0] == 1  # "{"
    assert_shared_probability(sample)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "paint"}}},
    ],
    ids=["schema", "object", "required", "named"],
)
async def test_white_space_in_json_is_limited(bench: Any, form: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bench.path)
    (space,) = tokenizer.encode(" ")
    await ask(bench, max_tokens=60, logit_bias={str(space): 100}, **form)  # a space wherever one is allowed
    spaces = re.search(" {2,}", tokenizer.decode(bench.sample.output_ids))
    assert len(spaces[0]) == MAX_WHITE_SPACE


def assert_shared_probability(sample: Any) -> None:
    """Assert that the allowed tokens share the whole probability."""
    for allowed, logprob, policy in zip(sample.allowed, sample.logprobs, sample.policy_logprobs, strict=True):
        assert logprob >= policy - 1e-4
        assert allowed != 1 or logprob == pytest.approx(0, abs=1e-6)


async def test_choices_are_counted_and_a_clients_logprobs_stay_its_own(bench: Any) -> None:
    how = {"extra_body": {"structured_outputs": {"regex": PATTERN}}}
    answer = await ask(bench, temperature=0.7, logprobs=True, top_logprobs=2, **how)
    sample = bench.sample
    assert policy_difference(bench.reference(), sample, 0.7).max() < TOLERANCE
    assert_shared_probability(sample)
    assert sample.allowed.count(1) > 20
    assert sample.allowed[:12] == [1] * 12  # {"colour": "
    assert sample.allowed[12] == 3
    assert max(sample.allowed) > 100
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(sample.logprobs[: len(entries)], abs=1e-5)
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    answered = json.loads(answer.choices[0].message.content, strict=False)  # a string may have a line break
    assert answered["colour"] in ("red", "green", "blue")


@pytest.mark.parametrize(
    "constraint",
    [
        {"logit_bias": {"65": 4.0, "66": -100}},
        {"presence_penalty": 1.5},
        {"extra_body": {"min_tokens": 24}},
        {"extra_body": {"bad_words": ["A", "B"]}},
        {"extra_body": {"allowed_token_ids": [65, 66, 67]}},
    ],
    ids=["bias", "penalty", "min_tokens", "bad_words", "allowed_token_ids"],
)
async def test_other_constraints_are_recorded_too(bench: Any, constraint: dict[str, Any]) -> None:
    await ask(bench, max_tokens=24, temperature=0.7, **constraint)
    sample = bench.sample
    assert policy_difference(bench.reference(), sample, 0.7).max() < TOLERANCE
    changed = [abs(a - b) > 1e-4 for a, b in zip(sample.logprobs, sample.policy_logprobs, strict=True)]
    assert any(changed)
    assert all(allowed > 1 for allowed, differs in zip(sample.allowed, changed, strict=True) if differs)
    if "extra_body" in constraint and "allowed_token_ids" in constraint["extra_body"]:
        assert set(sample.allowed) == {3}


async def test_a_batch_mixes_free_and_constrained_answers(bench: Any) -> None:
    before = len(bench.contexts)
    await asyncio.gather(
        *(ask(bench, response_format=FORMAT, temperature=0.7) for _ in range(3)),
        *(ask(bench, max_tokens=60, temperature=1.0, extra_body={"ignore_eos": True}) for _ in range(3)),
        ask(bench, max_tokens=60, logprobs=True, top_logprobs=4, extra_body={"ignore_eos": True}),
        ask(bench, response_format=FORMAT, temperature=0),
    )
    model = bench.reference()
    samples = [context.samples[0] for context in bench.contexts[before:]]
    constrained = [sample for sample in samples if sample.allowed]
    free = [sample for sample in samples if not sample.allowed]
    assert (len(constrained), len(free)) == (4, 4)
    for sample in constrained:
        heat = sample.sampling["temperature"] or 1.0
        assert policy_difference(model, sample, heat).max() < TOLERANCE
    for sample in free:
        assert sample.policy_logprobs == []
        assert difference(model, sample).max() < TOLERANCE


async def test_the_policys_logprobs_follow_weights_that_change_in_flight(bench: Any, learner: Any) -> None:
    """Each token has the log-prob of the weights that sampled it."""
    before = learner.state_dict()
    old = {name: tensor.clone() for name, tensor in before.items()}
    first = bench.engine.version
    wordy = {"type": "object", "properties": {"text": {"type": "string", "minLength": 250}}}
    wordy |= {"required": ["text"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "wordy", "schema": wordy}}
    task = asyncio.create_task(ask(bench, response_format=form, max_tokens=300))
    count = len(bench.contexts)
    await until(lambda: len(bench.contexts) > count and bench.contexts[-1].samples)
    await until(lambda: len(bench.sample.output_ids) > 5)
    await load_weights(bench.engine, next(bench.versions), change(learner, 3))
    await task
    sample = bench.sample
    versions = torch.tensor(sample.weight_versions)
    assert len(set(sample.weight_versions)) == 2
    assert policy_difference(learner, sample)[versions != first].max() < TOLERANCE
    learner.load_state_dict(old)
    assert policy_difference(learner, sample)[versions == first].max() < TOLERANCE


async def test_only_sampled_tokens_have_more_columns() -> None:
    """vLLM gathers the log-probs of prompts, in any number, in the same step."""

    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors

    from raylight.engines.vllm.constraints import ConstraintRecorder

    def gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        column = token_ids[:, None]
        return LogprobsTensors(column.int(), logprobs.gather(-1, column), token_ids)

    def sample_tokens(_: Any) -> list[int]:
        tokens = [sampler.gather_logprobs(torch.zeros(n, 8), 0, torch.zeros(n).long()) for n in (2, 1, 5)]
        return [gathered.logprobs.shape[-1] for gathered in tokens]

    sampler = SimpleNamespace(gather_logprobs=gather)
    params = {"free": SamplingParams(), "bound": SamplingParams(presence_penalty=1)}
    runner = SimpleNamespace(
        sampler=sampler,
        sample_tokens=sample_tokens,
        execute_model_state=SimpleNamespace(logits=torch.zeros(2, 8)),
        input_batch=SimpleNamespace(
            req_ids=list(params), sampling_metadata=SimpleNamespace(max_num_logprobs=0, temperature=None)
        ),
        requests={name: SimpleNamespace(sampling_params=value) for name, value in params.items()},
    )
    ConstraintRecorder(runner)
    assert runner.sample_tokens(None) == [3, 1, 1]


async def test_a_runner_that_cannot_record_refuses_constrained_answers(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.engine._capture, "constraint_problem", "vLLM runs with speculative decoding")
    answer = await bench.http.post(
        "/v1/chat/completions", json={"model": "policy", "messages": HI, "response_format": FORMAT}
    )
    assert answer.status_code == 400
    assert "speculative decoding" in answer.text
    await ask(bench, max_tokens=4)


async def test_allowed_tokens_stay_with_their_request_when_rows_move() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    from raylight.engines.vllm.constraints import repair_allowed_tokens

    class RepairedBatch(InputBatch):
        """A subclass, so that vLLM's class stays unchanged."""

    for _ in range(2):
        repair_allowed_tokens(RepairedBatch)
    batch = RepairedBatch(
        max_num_reqs=4,
        max_model_len=16,
        max_num_batched_tokens=16,
        device=torch.device("cpu"),
        vocab_size=8,
        block_sizes=[16],
        kernel_block_sizes=[16],
        max_num_blocks_per_req=[1],
    )

    def add(name: str, allowed: list[int] | None = None) -> None:
        params = SamplingParams(allowed_token_ids=allowed)
        batch.add_request(CachedRequestState(name, [1, 2], [], params, None, ([0],), 0, []))

    def allowed(name: str) -> list[int]:
        mask = batch.allowed_token_ids_mask_cpu_tensor
        return (~mask[batch.req_id_to_index[name]]).nonzero()[:, 0].tolist()

    add("free")
    add("two", [1, 2])
    add("one", [3])
    batch.swap_states(1, 2)
    assert (allowed("free"), allowed("two"), allowed("one")) == ([*range(8)], [1, 2], [3])
    batch.remove_request("free")
    batch.condense()
    add("next")
    assert (allowed("next"), allowed("two"), allowed("one")) == ([*range(8)], [1, 2], [3])


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 24},
        {"stop": ["e", "a", "o"]},
        {"extra_body": {"stop_token_ids": list(range(97, 123))}},
        {"logit_bias": {str(token): -100 for token in range(97, 123)}, "max_tokens": 24},
        {"extra_body": {"min_tokens": 20}, "max_tokens": 24},
        {"response_format": FORMAT},
    ],
    ids=["length", "stop string", "stop token", "banned tokens", "min_tokens", "schema"],
)
async def test_each_way_to_end_or_constrain_has_the_policys_logprobs(
    bench: Any, settings: dict[str, Any]
) -> None:
    """Log-probs at a temperature are compared with plain transformers over the whole vocabulary."""
    await ask(bench, temperature=0.8, seed=1, **settings)
    sample = bench.sample
    recorded = sample.policy_logprobs or sample.logprobs
    expected = expected_logprobs(bench.reference(), sample.prompt_ids.tolist(), sample.output_ids, 0.8)
    assert torch.tensor(recorded) == pytest.approx(expected, abs=TOLERANCE)
