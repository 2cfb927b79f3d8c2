"""Log-probs of recorded requests leave vLLM's scheduler as numbers, those for a client as arrays."""

from types import SimpleNamespace
from typing import Any

import pytest


class Scheduler:
    """Stub of vLLM's scheduler: divides the log-probs of a step among its requests as vLLM does."""

    def __init__(self, requests: dict[str, Any]) -> None:
        self.requests = requests

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        outputs = [
            EngineCoreOutput(
                name,
                tokens,
                output.logprobs and output.logprobs.slice_request(index, len(tokens)),
                kv_transfer_params={"of": "a connector"} if name == "b" else None,
                new_sampling_mask=output.sampling_masks
                and output.sampling_masks.slice_request(index, len(tokens)),
            )
            for index, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True))
        ]
        return {0: EngineCoreOutputs(outputs=outputs)}


def make_step(lengths: list[int], with_logprobs: bool = True) -> Any:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = ["a", "b", "c"][: len(lengths)]
    rows = sum(lengths)
    values = -np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) / 4
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    found = LogprobsLists(np.zeros((rows, 2), np.int32), values, np.ones(rows, np.int32), starts)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[7] * length for length in lengths],
        logprobs=found if with_logprobs else None,
    )


def updated(step: Any) -> list[Any]:
    """Return the outputs for a recorded request, a recorded one with a connector, and one of a client."""
    from vllm.sampling_params import SamplingParams

    from raylight.engines.vllm.scheduler import RECORDED, PlainLogprobs

    recorded = SimpleNamespace(sampling_params=SamplingParams(logprobs=0, extra_args={RECORDED: True}))
    asked = SimpleNamespace(sampling_params=SamplingParams(logprobs=1))
    scheduler = type("Made", (PlainLogprobs, Scheduler), {})({"a": recorded, "b": recorded, "c": asked})
    return scheduler.update_from_output(None, step)[0].outputs


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 3, 1], [0, 1, 2]])
def test_only_recorded_requests_get_numbers(lengths: list[int]) -> None:
    from raylight.engines.vllm.scheduler import LOGPROBS

    step = make_step(lengths)
    first, second, third = updated(step)
    values = step.logprobs.logprobs[:, 0].tolist()
    a, b = lengths[0], lengths[0] + lengths[1]
    assert (first.new_logprobs, first.kv_transfer_params) == (None, {LOGPROBS: values[:a]})
    assert second.kv_transfer_params == {"of": "a connector", LOGPROBS: values[a:b]}
    assert third.kv_transfer_params is None
    assert third.new_logprobs.logprobs.tolist() == step.logprobs.logprobs[b:].tolist()


def test_a_step_without_log_probs_stays_as_it_is() -> None:
    assert [output.new_logprobs for output in updated(make_step([1, 1, 1], with_logprobs=False))] == [
        None
    ] * 3


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_uses_this_scheduler(bench: Any) -> None:
    from raylight.engines.vllm.scheduler import recording_scheduler

    config = bench.engine._client.vllm_config.scheduler_config
    assert config.get_scheduler_cls() is recording_scheduler
    assert bench.engine._capture._gets_numbers


@pytest.mark.parametrize(("is_async", "base"), [(True, "AsyncScheduler"), (False, "Scheduler")])
def test_the_scheduler_is_of_the_kind_that_vllm_would_make(
    is_async: bool, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raylight.engines.vllm import scheduler

    made: list[type] = []
    monkeypatch.setattr(scheduler.PlainLogprobs, "__init__", lambda self, **parts: made.append(type(self)))
    settings = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    scheduler.recording_scheduler(vllm_config=settings)
    assert made[0].__mro__[2].__name__ == base


def test_candidates_of_a_step_leave_as_bytes() -> None:
    """vLLM's own sampler truncates; only the requests that ask for candidates get them."""
    import numpy as np
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from raylight.engines.vllm.constraints import CandidateRecorder
    from raylight.engines.vllm.scheduler import CANDIDATES, PlainLogprobs
    from raylight.types import TokenSets

    torch.manual_seed(0)
    logits, top_p = torch.randn(3, 200) * 2, [0.5, 0.97, 1.0]
    none = torch.zeros(3)
    metadata = SamplingMetadata(
        torch.ones(3),
        False,
        True,
        torch.tensor(top_p),
        None,
        {},
        0,
        True,
        None,
        none,
        none,
        none + 1,
        [[]] * 3,
        None,
        {},
        LogitsProcessors(),
    )
    sampler = Sampler(logprobs_mode="processed_logprobs")
    names = ["a", "b", "c"]

    def sample(_grammar: Any) -> ModelRunnerOutput:
        found = sampler(logits.clone(), metadata)
        return ModelRunnerOutput(
            names,
            {name: row for row, name in enumerate(names)},
            found.sampled_token_ids.tolist(),
            found.logprobs_tensors.tolists(),
        )

    asking = SimpleNamespace(sampling_params=SamplingParams(logprobs=0, extra_args={CANDIDATES: True}))
    requests = {"a": asking, "b": SimpleNamespace(sampling_params=SamplingParams(logprobs=0)), "c": asking}
    batch = SimpleNamespace(req_ids=names)
    runner = SimpleNamespace(sampler=sampler, sample_tokens=sample, input_batch=batch, requests=requests)
    for asked in (["a", "b", "c"], ["a", "c"]):
        requests["b"].sampling_params.extra_args = {CANDIDATES: True} if "b" in asked else None
        sampler = runner.sampler = Sampler(logprobs_mode="processed_logprobs")
        runner.sample_tokens = sample
        CandidateRecorder(runner)
        scheduler = type("Made", (PlainLogprobs, Scheduler), {})(requests)
        sent = scheduler.update_from_output(None, runner.sample_tokens(None))[0]
        outputs = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent)).outputs
        for name, row, limit, output in zip(names, logits, top_p, outputs, strict=True):
            assert output.new_sampling_mask is None
            parts = (output.kv_transfer_params or {}).get(CANDIDATES)
            if name not in asked or limit == 1:
                assert parts is None
                continue
            found = TokenSets(*(np.frombuffer(part, np.int32) for part in parts))
            ordered, order = row.softmax(-1).sort(descending=True)
            kept = order[(ordered.cumsum(-1) - ordered) < limit]
            expected = np.zeros((1, len(row)), np.bool_)
            expected[0, kept.numpy()] = True
            assert found == TokenSets.from_mask(expected)
