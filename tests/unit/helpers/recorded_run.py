"""Directory of a run with two steps: its files, and a store with all kinds of rollouts."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from store_helpers import Box, Clock, open_box, reward_of, span_of
from unit_helpers import make_generation

from raylight.experience.batches.token_records import RowRecord, TokenRecords
from raylight.images.image import Image
from raylight.images.messages import recorded_url
from raylight.semconv import CALL_ID, DIALECT, INPUT_MESSAGES, OUTPUT_MESSAGES, REQUEST_PARAMETERS
from raylight.types import CallKey, EnqueueRolloutRequest, Failure, PlacedImage, StepGroups

LINEAGE = "abcd1234"
HOSTILE = "<img src=x onerror=alert(1)>"
SECRET = "sk-secret"


@dataclass
class Recorded:
    """A run's directory and ids of rollouts in it."""

    folder: Path
    multi_turn: str = f"{LINEAGE}-train-0-0"
    failed: str = f"{LINEAGE}-train-1-1"
    undecided: str = f"{LINEAGE}-train-2-0"


async def record_run(folder: Path, name: str = "run-1") -> Recorded:
    """Write a run's directory."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    content = {
        "agent": "tests:agent",
        "algorithm": {"name": "GRPO", "model": str(folder / "model"), "lr": 0.1},
        "engine": {"api_key": SECRET, "kind": "transformers"},
        "run": {"name": name, "total_steps": 3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    write_metrics(folder, [_row(0, 0.25, "val"), _row(1, 0.5, "train"), _row(2, 0.75, "train")])
    async with open_box(folder / "store.db", Clock(1_000.0)) as box:
        await _record_rollouts(box)
        for step in (1, 2):
            await box.store.record_step(LINEAGE, step, StepGroups((step - 1,), ()))
    record = RowRecord(0, 3, np.full(6, -0.5, np.float32), np.full(6, 1.5, np.float32))
    TokenRecords(folder).write(1, [record], [f"{LINEAGE}-train-0-0"])
    return Recorded(folder)


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to the metrics of a run."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _row(step: int, reward: float, mode: str) -> dict[str, Any]:
    more = {"weights/version": step, "ledger/generated": 10 * step} if step else {"val/reward_error": 0.1}
    return {"step": step, f"{mode}/reward": reward, "time/total_s": 2.0 * step, "learner/kl": None, **more}


async def _record_rollouts(box: Box) -> None:
    """Record two groups of training rollouts, an undecided one and a validation rollout."""
    requests = [
        EnqueueRolloutRequest(
            input={"question": f"What is {group}?", "html": HOSTILE},
            mode="train",
            group_id=f"train-{group}",
            rollout_id=f"{LINEAGE}-train-{group}-{sample}",
        )
        for group, sample in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    ]
    val = EnqueueRolloutRequest(
        input={"question": "What is 0?", "html": HOSTILE},
        mode="val",
        group_id="val-1-0",
        rollout_id=f"{LINEAGE}-val-1-0-0",
    )
    await box.store.enqueue_many_rollouts([*requests[:4], val, requests[4]])
    for number in range(5):
        box.clock.now += 1.0
        rollout = await box.again()
        box.clock.now += 0.5 + number
        for turn in range(2 if number == 0 else 1):
            await record_call(box, rollout, turn, number)
        if number == 3:
            failure = Failure(kind="agent", error="ValueError: no zebra", trace="Traceback\n  line 1")
            await box.store.finish_attempt(rollout, "failed", failure)
        else:
            spans = [
                span_of(rollout, "look up", attributes={"text": HOSTILE}),
                reward_of(rollout, number / 4),
            ]
            await box.store.finish_attempt(rollout, "succeeded", spans=spans)


def _ids(rollout: Any) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


async def record_call(box: Box, rollout: Any, turn: int, number: int, dialect: str = "chat") -> None:
    """Record a call; the second one continues the tokens and messages of the first."""
    question = {"role": "user", "content": f"What is {number}? {HOSTILE}"}
    answer = {"role": "assistant", "content": f"It is zebra{number} of turn {turn}."}
    messages = (
        [question] if turn == 0 else [question, _answer_before(number), {"role": "user", "content": "Sure?"}]
    )
    key = CallKey(*_ids(rollout), f"call-{number}-{turn}")
    prompt = [1, 2, 3] if turn == 0 else [1, 2, 3, 4, 5, 6, 7]
    call = make_generation(
        prompt, [4, 5] if turn == 0 else [8, 9], key=key, versions=[0, 0], start=box.clock.now
    )
    span = span_of(
        rollout,
        "openai.chat.completion",
        attributes={
            CALL_ID: key.call_id,
            DIALECT: dialect,
            INPUT_MESSAGES: json.dumps(messages),
            OUTPUT_MESSAGES: json.dumps([answer]),
            REQUEST_PARAMETERS: json.dumps({"model": "policy", "temperature": 1.0}),
        },
    )
    await box.store.capture([(key, box.clock.now)], [(key, call, span)])


def _answer_before(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"It is zebra{number} of turn 0."}


async def record_image_run(folder: Path, image: Image) -> str:
    """Write the directory of a run with one rollout, whose only call has an image; return its id."""
    folder.mkdir(parents=True)  # noqa: ASYNC240
    (folder / "config.yaml").write_text(yaml.safe_dump({"agent": "tests:agent", "run": {"name": "run-1"}}))
    part = {"type": "image_url", "image_url": {"url": recorded_url(image.sha256)}}
    asked = [{"role": "user", "content": [{"type": "text", "text": f"which color? {HOSTILE}"}, part]}]
    async with open_box(folder / "store.db", Clock(1_000.0)) as box:
        request = EnqueueRolloutRequest(input={}, mode="train", rollout_id=f"{LINEAGE}-train-0-0")
        await box.store.enqueue_many_rollouts([request])
        rollout = await box.again()
        key = CallKey(*_ids(rollout), "call-0")
        call = make_generation([1, 9, 9, 2], [4, 5], key=key, start=box.clock.now)
        call = replace(call, images=(PlacedImage(image.sha256, 1, 3),))
        attributes = {
            CALL_ID: key.call_id,
            DIALECT: "chat",
            INPUT_MESSAGES: json.dumps(asked),
            OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": "red"}]),
            REQUEST_PARAMETERS: json.dumps({"model": "policy"}),
        }
        span = span_of(rollout, "openai.chat.completion", attributes=attributes)
        await box.store.write_images({image.sha256: image.data})
        await box.store.capture([(key, box.clock.now)], [(key, call, span)])
        await box.store.finish_attempt(rollout, "succeeded", spans=[reward_of(rollout, 1.0)])
    return str(rollout.rollout_id)
