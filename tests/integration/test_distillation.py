"""On-policy distillation on a real cluster: log-probs of the teacher, a lost replica, a resumed run."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_rows import plain_logprobs, plain_tops, random_rows
from run_output import metric_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import raylight as rl
from raylight import semconv
from raylight.config import EngineConfig
from raylight.errors import TeacherPromptError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, question
from raylight.quickstart.agent import adder
from raylight.trainer.components.served_model import ServingContext
from raylight.trainer.components.teacher import Teacher
from raylight.trainer.spec.settings import ServedTeacher, ServingSettings
from raylight.types import CallKey, FinishedRollout, Generation, Rollout, Span, Trajectory

TRAIN, _ = additions(0)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("connected")]


def dying_teacher(folder: Path, max_model_len: int, top_k: int | None = None, **config: Any) -> Any:
    """Return a teacher whose first replica dies when it scores."""
    engine = EngineConfig(
        kind="dying_engine:build_dying_engine",
        args={"marker": str(folder / "died")},
        num_cpus=0.1,
        max_model_len=max_model_len,
        max_concurrent=1,
    )
    settings = rl.algorithms.TeacherConfig(model=STARTER_MODEL, timeout_s=300.0, **config)
    return ServedTeacher(settings, ServingSettings(STARTER_MODEL, engine, "teacher"), top_k)


async def test_a_teacher_whose_replica_dies_scores_as_plain_transformers_does(tmp_path: Path) -> None:
    rows, notes = random_rows(24), list[str]()
    batch = TrainBatch([0.0] * 24, ["g"] * 24, rows, list(range(24)))
    model = dying_teacher(tmp_path, max_model_len=64)
    async with AsyncExitStack() as stack:
        teacher = Teacher(ServingContext("distilled", "secret", notes.append, False), model)
        await teacher.service.open(stack)
        await teacher.service.start()
        scored, metrics = await teacher.score(batch, [])
    assert scored.teacher_logprobs is not None
    for found, expected in zip(scored.teacher_logprobs, plain_logprobs(STARTER_MODEL, rows), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert metrics["teacher/retries"] >= 1
    assert any("a replica of the teacher was lost" in note for note in notes)


async def test_a_teacher_gives_its_most_probable_tokens(tmp_path: Path) -> None:
    rows = random_rows(6)
    batch = TrainBatch([0.0] * 6, ["g"] * 6, rows, list(range(6)))
    async with AsyncExitStack() as stack:
        settings = dying_teacher(tmp_path, max_model_len=64, top_k=4)
        teacher = Teacher(ServingContext("tops", "secret", print, False), settings)
        await teacher.service.open(stack)
        await teacher.service.start()
        scored, _ = await teacher.score(batch, [])
    assert scored.teacher_tops is not None
    for found, expected in zip(scored.teacher_tops, plain_tops(STARTER_MODEL, rows, 4), strict=True):
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def with_sum(task: dict, messages: list[dict]) -> list[dict]:
    return [{"role": "system", "content": f"The answer is {task['a'] + task['b']}."}, *messages]


def asked(tasks: list[dict]) -> list[FinishedRollout]:
    """Return rollouts of one call each, as the gateway records them, whose answers are any digits."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    finished = []
    for number, task in enumerate(tasks):
        messages = [{"role": "user", "content": question(task)}]
        key = CallKey(f"ro-{number}", "at-1", f"{number:032x}")
        tokens = rendered(tokenizer, messages), tokenizer.encode(str(37 * number))
        zeros = [0] * len(tokens[1])
        call = Generation(key, "policy", *tokens, zeros, zeros, "stop", 0.0, 1.0)
        attributes = {
            semconv.CALL_ID: key.call_id,
            semconv.DIALECT: "chat",
            semconv.INPUT_MESSAGES: json.dumps(messages),
            semconv.REQUEST_PARAMETERS: "{}",
        }
        span = Span.from_attributes(
            rollout_id=key.rollout_id, attempt_id="at-1", sequence_id=1, name="chat", attributes=attributes
        )
        rollout = Rollout(input=task, rollout_id=key.rollout_id, start_time=0.0)
        finished.append(FinishedRollout(rollout, None, [call], [span]))
    return finished


def rendered(tokenizer: Any, messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


async def test_a_teacher_with_the_answer_scores_as_plain_transformers_does(tmp_path: Path) -> None:
    """One of its replicas dies meanwhile."""
    tokenizer, finished, notes = AutoTokenizer.from_pretrained(STARTER_MODEL), asked(TRAIN[:24]), list[str]()
    rows = [build_trajectories(item.generations).rows[0] for item in finished]
    batch = TrainBatch([0.0] * 24, ["g"] * 24, rows, list(range(24)))
    model = dying_teacher(tmp_path, max_model_len=128, prompt=with_sum)
    async with AsyncExitStack() as stack:
        teacher = Teacher(ServingContext("prompted", "secret", notes.append, False), model)
        await teacher.service.open(stack)
        await teacher.service.start()
        scored, metrics = await teacher.score(batch, finished)
        with pytest.raises(TeacherPromptError, match=r"cannot render the messages .*status 400"):
            await teacher._send("render_chats", ['{"messages": []}'], [1])
    assert scored.teacher_logprobs is not None
    read = []
    for row, item in zip(rows, finished, strict=True):
        task, answer = item.rollout.input, row.token_ids[row.prompt_length :]
        prompt = rendered(tokenizer, with_sum(task, [{"role": "user", "content": question(task)}]))
        mask = [0] * len(prompt) + [1] * len(answer)
        read.append(Trajectory("r", [*prompt, *answer], mask, np.zeros(len(mask)), mask))
    pairs = zip(scored.teacher_logprobs, plain_logprobs(STARTER_MODEL, read), strict=True)
    worst = max(float(np.abs(found - expected).max()) for found, expected in pairs)
    assert worst < 5e-5
    assert metrics["teacher/retries"] >= 1
    assert (metrics["teacher/changed_prompts"], metrics["teacher/other_renderings"]) == (24, 0)


@pytest.fixture(scope="module")
def surer_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of the quickstart's model with doubled logits, as at temperature 0.5."""
    folder = tmp_path_factory.mktemp("surer")
    shutil.copytree(STARTER_MODEL, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(STARTER_MODEL, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight *= 2
    model.save_pretrained(folder)
    return str(folder)


@rl.rollout
async def unscored_adder(task: dict, llm: rl.LLM, rollout: rl.Rollout) -> None:
    """The quickstart's agent without its reward; its answers depend on the weights and the rollout only."""
    _, _, group, sample = rollout.rollout_id.split("-")
    parameters = llm.sampling_parameters | {"seed": int(group) * 1000 + int(sample)}
    await adder(task, llm.model_copy(update={"sampling_parameters": parameters}))


def fit(folder: Path, teacher: Any, n_steps: int, resume: Any = False, **settings: Any) -> list[dict]:
    algorithm = rl.OPD(
        model=STARTER_MODEL,
        teacher={"model": teacher, "num_cpus": 0.1} if isinstance(teacher, str) else teacher,
        group_size=4,
        tasks_per_step=4,
        n_steps=n_steps,
        val_every=None,
        val_before_train=False,
        **{"lr": 2e-4} | settings,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        runner={"n": 1, "max_concurrent": 1},  # the engine computes one response at a time
        checkpoint={"every": 2},
        output_dir=folder,
        progress=False,
    )
    trainer.fit(unscored_adder, TRAIN, resume=resume)
    rows = metric_rows(folder)
    return [row for row in rows if row["step"]]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()


def test_a_resumed_run_has_the_same_weights(surer_model: str, tmp_path: Path) -> None:
    """The student comes closer to the teacher without any reward."""
    rows = fit(tmp_path / "whole", surer_model, 5)
    assert rows[-1]["learner/teacher_kl"] < 0.7 * rows[0]["learner/teacher_kl"]
    assert all(row["train/trained"] == 16 and "train/reward" not in row for row in rows)

    class Interrupted(Exception):
        pass

    score = Teacher.score
    calls = []

    async def stop_at_4(self: Teacher, batch: TrainBatch, finished: list[FinishedRollout]) -> Any:
        calls.append(len(batch.rows))
        if len(calls) == 4:
            raise Interrupted
        return await score(self, batch, finished)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Teacher, "score", stop_at_4)
        with pytest.raises(Interrupted):
            fit(tmp_path / "resumed", surer_model, 5)
    resumed = fit(tmp_path / "resumed", surer_model, 5, resume="auto")  # takes step 3 again
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5]
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")
    version = str(tmp_path / "whole" / "checkpoint")  # as the teacher of the model that it was before
    (step,) = fit(tmp_path / "older", version, 1)
    assert abs(step["learner/teacher_kl"]) > 1e-3  # that of the starting model would be 0


def test_a_student_equal_to_its_teacher_stays_at_another_temperature(tmp_path: Path) -> None:
    """The learning rate is low: Adam would make whole steps of rounding errors."""
    rows = fit(tmp_path, STARTER_MODEL, 3, lr=1e-7, sampling_parameters={"temperature": 0.7})
    assert [row["learner/teacher_kl"] for row in rows] == pytest.approx([0.0] * 3, abs=1e-3)
    assert rows[0]["learner/advantage_abs_mean"] < 1e-5
    assert rows[0]["learner/grad_norm"] < 1e-4


@pytest.mark.parametrize("top_k", [None, 8], ids=["learner", "engine"])
def test_the_divergence_of_whole_distributions_is_measured(
    top_k: int | None, surer_model: str, tmp_path: Path
) -> None:
    """Teachers on the learners' ranks and in an engine see the same rollouts; few tokens are beyond 8."""
    teacher = {"model": surer_model} | ({} if top_k is None else {"num_cpus": 0.1})
    (row,) = fit(tmp_path, teacher, 1, divergence="forward_kl", teacher_top_k=top_k)
    assert row["learner/divergence"] == pytest.approx(0.1206, abs=0.01)
    assert ("time/teacher_s" in row) == (top_k is not None)


def test_rollouts_go_on_beside_the_teacher(surer_model: str, tmp_path: Path) -> None:
    rows = fit(tmp_path, surer_model, 6, max_staleness=2)
    assert max(row["async/staleness_max"] for row in rows) >= 1
    assert rows[-1]["learner/teacher_kl"] < 0.8 * rows[0]["learner/teacher_kl"]
    assert all(row["time/teacher_s"] > 0 for row in rows)
