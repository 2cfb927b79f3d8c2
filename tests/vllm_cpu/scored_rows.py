"""A teacher of two replicas of vLLM renders messages and scores random rows; prints the largest difference
from plain transformers: python scored_rows.py"""

import asyncio
import json
from contextlib import AsyncExitStack

import numpy as np
from random_rows import plain_logprobs, plain_tops, random_rows
from transformers import AutoTokenizer

import raylight as rl
from raylight.experience.batches.batch import TrainBatch
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit.scoring_models import fitted_engine
from raylight.trainer.components.served_model import ServingContext
from raylight.trainer.components.teacher import Teacher
from raylight.trainer.ray_session.connection import ray_session
from raylight.trainer.spec.settings import ServedTeacher, ServingSettings

MESSAGES = [{"role": "system", "content": "It is 4."}, {"role": "user", "content": "2+2="}]


async def score() -> float:
    config = rl.algorithms.TeacherConfig(model=STARTER_MODEL, kind="vllm", replicas=2)
    settings = ServedTeacher(
        config, ServingSettings(STARTER_MODEL, fitted_engine(config, config.engine(), 64), "teacher")
    )
    rows = random_rows(64, longest=64)
    async with AsyncExitStack() as stack:
        teacher = Teacher(ServingContext("distilled", "secret", print, True), settings)
        await teacher.service.open(stack)
        await teacher.service.start()
        (tokens,) = await teacher._send("render_chats", [json.dumps({"messages": MESSAGES})], [1])
        batch = TrainBatch([0.0] * 64, ["g"] * 64, rows, list(range(64)))
        scored, _ = await teacher.score(batch, [])
        teacher._top_k = 8
        with_tops, _ = await teacher.score(batch, [])
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert tokens == tokenizer.encode(text, add_special_tokens=False)
    assert scored.teacher_logprobs is not None
    pairs = zip(scored.teacher_logprobs, plain_logprobs(STARTER_MODEL, rows), strict=True)
    differences = [float(np.abs(found - expected).max()) for found, expected in pairs]
    assert with_tops.teacher_tops is not None
    tops = zip(with_tops.teacher_tops, plain_tops(STARTER_MODEL, rows, 8), strict=True)
    return max(
        *differences, *(float(np.abs(found.logprobs - expected.logprobs).max()) for found, expected in tops)
    )


if __name__ == "__main__":
    with ray_session("local", False):
        print(asyncio.run(score()))
