"""A rollout that alternates between two SDKs and calls a traced external judge yields one trajectory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_output import metric_rows
from scripted_models import serve_chat
from starlette.requests import Request
from starlette.responses import JSONResponse

import raylight as rl
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.semconv import INPUT_MESSAGES, PROMPT_SOURCE

TRAIN, _ = additions(0)
TURNS = 4


async def judge_app(request: Request) -> JSONResponse:
    assert request.headers["authorization"] == "Bearer the judge's key"
    body = await request.json()
    answer = {"role": "assistant", "content": "fine"}
    return JSONResponse(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": answer, "finish_reason": "stop"}],
        }
    )


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """Base URL of an external model that requires its own key."""
    with serve_chat(judge_app) as url:
        yield url


@rl.rollout
async def two_sdk_agent(task: dict[str, int], llm: rl.LLM, judge: rl.LLM) -> float:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from raylight.quickstart.additions import question

    messages: list[Any] = [{"role": "user", "content": question(task)}]
    base = llm.endpoint.removesuffix("/v1")
    async with (
        AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as gpt,
        AsyncAnthropic(base_url=base, api_key=llm.api_key) as claude,
    ):
        for turn in range(TURNS):
            if turn % 2:
                reply = await claude.messages.create(
                    model=llm.model, messages=messages, max_tokens=6, extra_body={"temperature": 1.0}
                )
                text = reply.content[0].text if reply.content else ""
            else:
                stream = await gpt.chat.completions.create(
                    model=llm.model, messages=messages, max_tokens=6, temperature=1.0, stream=True
                )
                text = "".join(
                    [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
                )
            messages += [
                {"role": "assistant", "content": f" {text.strip()} \n"},
                {"role": "user", "content": "and once more?"},
            ]
    async with AsyncOpenAI(base_url=judge.endpoint, api_key=judge.api_key) as client:
        verdict = await client.chat.completions.create(
            model=judge.model, messages=[{"role": "user", "content": "is it good?"}]
        )
    assert verdict.choices[0].message.content == "fine"
    return float(task["a"] % 2)


@pytest.fixture(scope="module")
def folder(judge: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    algorithm = rl.GRPO(model=STARTER_MODEL, n_steps=1, tasks_per_step=4, group_size=2, lr=2e-4)
    fixed = rl.LLM(endpoint=judge, model="judge-1", api_key="the judge's key", traced=True)
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=1,
        output_dir=folder,
        progress=False,
        address="local",
        initial_resources={"judge": fixed},
    )
    trainer.fit(two_sdk_agent, TRAIN)
    return folder


@pytest.mark.slow
async def test_a_conversation_in_two_dialects_is_one_trajectory(folder: Path) -> None:
    (row,) = metric_rows(folder)
    assert row["train/failed"] == 0
    assert row["trace/extensions"] == 8 * (TURNS - 1)
    assert row["trace/drifts_response"] == row["trace/forks"] == row["train/aborted"] == 0
    service = rl.StoreService(folder / "store.db", read_only=True)
    store = rl.StoreClient(service)
    try:
        for rollout in await store.query_rollouts():
            (item,) = await store.collect([rollout.rollout_id], with_spans=True)
            assert len(build_trajectories(item.generations).rows) == 1
            calls = [span for span in item.spans if PROMPT_SOURCE in span.attributes]
            sources = [
                span.attributes[PROMPT_SOURCE]
                for span in calls
                if span.attributes["gen_ai.request.model"] == "policy"
            ]
            assert sorted(sources) == ["rendered", *["spliced"] * (TURNS - 1)]
            (asked,) = [span for span in calls if span.attributes["gen_ai.request.model"] == "judge-1"]
            assert "is it good?" in asked.attributes[INPUT_MESSAGES]
    finally:
        await service.close()
