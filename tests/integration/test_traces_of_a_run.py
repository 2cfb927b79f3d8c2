"""Traces that a GRPO run leaves in its store.

Captured calls are spans that every adapter reads. One of several agents is trained. Another process adds
spans by OTLP. The agent declares further models.
"""

from pathlib import Path
from typing import Any

import pytest
from run_output import metric_rows

import raylight as rl
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions

pytestmark = pytest.mark.slow

TRAIN, VAL = additions(0)


@rl.rollout(
    model=rl.LLM(name="any"), judge=rl.LLM(endpoint="http://judge", model="fixed"), trained_agents="^solver$"
)
async def solver_and_critic(task: dict[str, int], model: rl.LLM, judge: rl.LLM, rollout: rl.Rollout) -> float:
    """Run a solver and a critic with one model, and a tool in another process that exports spans by OTLP."""
    import httpx
    from openai import AsyncOpenAI

    from raylight.quickstart.additions import is_right, question

    assert judge.endpoint == "http://judge"
    assert rollout.mode == "train"
    answers = []
    for name in ("solver", "critic"):
        named = model.for_agent(name)
        async with AsyncOpenAI(base_url=named.get_base_url(), api_key=named.api_key) as client:
            reply = await client.chat.completions.create(
                model=named.model,
                messages=[{"role": "user", "content": question(task)}],
                temperature=0.5,
                top_p=0.9,
                max_tokens=8,
            )
            answers.append(reply.choices[0].message.content)
    span = {
        "traceId": "0" * 31 + "1",
        "spanId": f"{task['a']:08x}{task['b']:08x}",
        "name": "tool",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [{"key": "sum", "value": {"intValue": task["a"] + task["b"]}}],
    }
    async with httpx.AsyncClient() as http:
        sender = {"Authorization": f"Bearer {model.traces_key}"}
        body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
        answer = await http.post(
            f"{model.get_base_url()}/traces",
            json=body,
            headers=sender,
        )
        assert answer.status_code == 200, answer.text
    return float(is_right(task, answers[0] or ""))


async def read(path: Path) -> list[tuple[Any, list[rl.Span]]]:
    service = rl.StoreService(path, read_only=True)
    store = rl.StoreClient(service)
    try:
        rollouts = await store.query_rollouts(limit=8)
        finished = await store.collect([rollout.rollout_id for rollout in rollouts])
        return [(item, await store.query_spans(item.rollout.rollout_id, "latest")) for item in finished]
    finally:
        await service.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        n_steps=2,
        tasks_per_step=4,
        lr=2e-4,
        max_steps_without_signal=10_000,
        override_sampling=True,
    )
    trainer = rl.Trainer(algorithm=algorithm, n_runners=2, output_dir=folder, progress=False, address="local")
    trainer.fit(solver_and_critic, TRAIN)
    return folder


def test_only_the_named_agent_is_trained(folder: Path) -> None:
    rows = metric_rows(folder)
    for row in rows:
        assert row["train/trained"] == 32
        assert row["train/other_agents"] == 32  # the critic's calls
        assert row["trace/calls"] == 32
        assert row["trace/drifts_response"] == 0
        assert row["off_policy/overridden_calls"] == 64
        assert row["off_policy/calls"] == 0
        assert row["mismatch/logprob_abs_max"] < 1e-3


async def test_the_sampling_of_training_calls_was_overridden(folder: Path) -> None:
    for item, _ in await read(folder / "store.db"):
        for call in item.generations:
            assert call.sampling["overridden"] == {"temperature": 0.5, "top_p": 0.9}
            assert call.sampling["temperature"] == 1.0
            assert call.sampling.get("top_p", 1.0) == 1.0


async def test_adapters_read_the_captured_calls(folder: Path) -> None:
    for item, spans in await read(folder / "store.db"):
        assert item.rollout.status == "succeeded"
        assert [span.sequence_id for span in spans] == list(range(1, len(spans) + 1))
        assert {span.name for span in spans} == {
            "openai.chat.completion",
            "tool",
            "agentlightning.annotation",
        }
        solver, critic = sorted(item.generations, key=lambda generation: generation.agent != "solver")
        assert (solver.agent, critic.agent) == ("solver", "critic")
        task = item.rollout.input

        triplets = rl.TracerTraceToTriplet(agent_match="solver").adapt(spans)
        assert [t.prompt["token_ids"] for t in triplets] == [solver.prompt_ids.tolist()]
        assert triplets[0].response["token_ids"] == solver.output_ids.tolist()
        assert len(rl.LlmProxyTraceToTriplet().adapt(spans)) == 2
        assert len(build_trajectories(item.generations).rows) == 2

        messages = rl.TraceToMessages().adapt(spans)
        assert len(messages) == 2
        assert messages[0]["messages"][0]["role"] == "user"
        assert str(task["a"]) in messages[0]["messages"][0]["content"]
        assert messages[0]["messages"][1]["role"] == "assistant"
        assert rl.find_final_reward(spans) == item.reward
        (tool,) = [span for span in spans if span.name == "tool"]
        assert tool.attributes == {"sum": task["a"] + task["b"]}
