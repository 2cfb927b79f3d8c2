"""A teacher of two replicas of vLLM renders messages and scores random rows; prints the largest difference
from plain transformers: python scored_rows.py"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
from random_rows import plain_logprobs, random_rows
from transformers import AutoTokenizer

import raylight as rl
from raylight.experience.batch import TrainBatch
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit.scoring_models import fitted_engine
from raylight.trainer.components.teacher import Teacher
from raylight.trainer.ray_session.connection import ray_session
from raylight.trainer.spec.settings import ServingSettings

MESSAGES = [{"role": "system", "content": "It is 4."}, {"role": "user", "content": "2+2="}]


async def score() -> float:
    config = rl.algorithms.TeacherConfig(model=STARTER_MODEL, kind="vllm", replicas=2)
    model = ServingSettings(STARTER_MODEL, config.engine(), "teacher")
    model = replace(model, engine=fitted_engine(model, config, 64))
    rows = random_rows(64, longest=64)
    async with AsyncExitStack() as stack:
        teacher = Teacher("distilled", model, 120.0, "secret", print, True)
        await teacher.service.open(stack)
        await teacher.service.start()
        (tokens,) = await teacher._send("render_chats", [json.dumps({"messages": MESSAGES})], [1])
        scored, _ = await teacher.score(TrainBatch([0.0] * 64, ["g"] * 64, rows, list(range(64))), [])
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert tokens == tokenizer.encode(text, add_special_tokens=False)
    assert scored.teacher_logprobs is not None
    pairs = zip(scored.teacher_logprobs, plain_logprobs(STARTER_MODEL, rows), strict=True)
    return max(float(np.abs(found - expected).max()) for found, expected in pairs)


if __name__ == "__main__":
    with ray_session("local", False):
        print(asyncio.run(score()))
