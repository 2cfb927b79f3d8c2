"""The teacher of a distillation: requests to its replicas, its settings, and checks of its model."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayTaskError
from training_world import FakeRun, World, live
from transformers import AutoTokenizer
from unit_helpers import make_finished, make_generation, make_key, make_rollout

import raylight as rl
from raylight import semconv
from raylight.algorithms.teacher import TeacherConfig
from raylight.config import EngineConfig
from raylight.errors import (
    ConfigError,
    ModelNotFoundError,
    RowTooLongError,
    ServingLostError,
    TeacherPromptError,
    WeightSyncError,
)
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.quickstart import STARTER_MODEL, TOOL_MODEL
from raylight.serving.deploy.replica import ScoredRow
from raylight.trainer.cluster_fit import scoring_models
from raylight.trainer.cluster_fit.cluster_settings import fit_scoring_models
from raylight.trainer.cluster_fit.scoring_models import fit_teacher, plan_teachers, without_images
from raylight.trainer.components.served_model import ServingContext
from raylight.trainer.components.teacher import MOST_TOKENS, Teacher, Teachers, split_rows
from raylight.trainer.spec.settings import RankTeacher, ServedTeacher, ServingSettings
from raylight.types import FinishedRollout, Span, TopLogprobs, Trajectory


@given(st.lists(st.integers(2, 2 * MOST_TOKENS), max_size=40), st.integers(1, 6))
def test_rows_are_divided_in_order_and_within_the_limit(lengths: list[int], parts: int) -> None:
    found = list(split_rows(lengths, parts))
    assert [index for part in found for index in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= MOST_TOKENS for part in found)


def test_all_replicas_get_rows() -> None:
    assert list(split_rows([4] * 8, 4)) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


class Handle:
    """A deployment whose replicas give each token the log-prob -id."""

    def __init__(self, fail: Callable[[int], Exception | None] = lambda call: None) -> None:
        self.call = self
        self.fail, self.calls, self.running, self.most = fail, 0, 0, 0
        self.rows: list[int] = []
        """First tokens of the scored rows."""

    async def remote(self, method: str, rows: list[Any], *arguments: int) -> list[Any]:
        self.calls, self.running = self.calls + 1, self.running + 1
        self.most = max(self.most, self.running)
        try:
            error = self.fail(self.calls)
            await asyncio.sleep(0)
            if error is not None:
                raise error
            if method == "render_chats":
                return [render(json.loads(request)["messages"]) for request in rows]
            if method == "top_logprobs":
                return [tops(row.ids[row.start :], *arguments) for row in rows]
            self.rows = sorted([*self.rows, *(int(row.ids[0]) for row in rows)])
            return [-row.ids[row.start :].astype(np.float32) for row in rows]
        finally:
            self.running -= 1


def tops(ids: Any, k: int) -> TopLogprobs:
    """Return the tokens of the next k numbers as the most probable ones of each."""
    found = ids[:, None] + np.arange(k, dtype=np.int32)
    return TopLogprobs(found, -found.astype(np.float32))


def render(messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of messages: the number of each, then one that begins the answer."""
    return [*(message["content"] for message in messages), 7]


def context(show: Callable[[str], None] = print, name: str = "run-1") -> ServingContext:
    return ServingContext(name, None, show, owns_cluster=True)


def make_teacher(
    handle: Handle,
    replicas: int = 2,
    timeout_s: float = 30.0,
    prompt: Any = None,
    longest: int = 2048,
    top_k: int | None = None,
) -> tuple[Teacher, list[str]]:
    notes: list[str] = []
    engine = EngineConfig(replicas=replicas, max_model_len=longest)
    model = ServingSettings(STARTER_MODEL, engine, "teacher")
    config = TeacherConfig(model=STARTER_MODEL, timeout_s=timeout_s, prompt=prompt)
    teacher = Teacher(context(notes.append), ServedTeacher(config, model, top_k))
    teacher.service._router = handle
    return teacher, notes


def make_teachers(handles: dict[str, Handle], choice: Any) -> Teachers:
    model = ServingSettings(STARTER_MODEL, EngineConfig(), "teacher")
    settings = {name: ServedTeacher(TeacherConfig(model=STARTER_MODEL), model) for name in handles}
    teachers = Teachers(context(), settings, choice)
    for teacher, handle in zip(teachers._served, handles.values(), strict=True):
        teacher.service._router = handle
    return teachers


def make_batch(count: int = 16) -> TrainBatch:
    rows = [
        Trajectory("r", [n, 7, 8, n + 1], [0, 0, 1, 1], [0, 0, -1, -1], [-1, -1, 0, 0]) for n in range(count)
    ]
    return TrainBatch([1.0] * count, ["g"] * count, rows, list(range(count)))


async def test_each_row_has_the_log_probs_of_its_response() -> None:
    handle = Handle()
    scored, metrics = await make_teacher(handle)[0].score(make_batch(), [])
    assert scored.teacher_logprobs is not None
    assert [row.tolist() for row in scored.teacher_logprobs] == [[-8.0, -(n + 1.0)] for n in range(16)]
    assert handle.calls == 4
    assert handle.most <= 4  # two for each replica
    assert metrics["teacher/retries"] == 0


async def test_each_row_has_the_most_probable_tokens_of_its_response() -> None:
    teacher, _ = make_teacher(Handle(), top_k=3)
    scored, _ = await teacher.score(make_batch(), [])
    assert scored.teacher_logprobs is None
    assert scored.teacher_tops is not None
    assert [top.ids.tolist() for top in scored.teacher_tops] == [
        [[8, 9, 10], [n + 1, n + 2, n + 3]] for n in range(16)
    ]
    shards = list(shard_batch(scored, PolicySettings(), 2))
    parts = [shard.rows.teacher_tops for shard in shards]
    assert sum(len(part.ids) for part in parts) == 32
    assert all((part.logprobs == -part.ids).all() for part in parts)


async def test_each_row_is_scored_by_the_teacher_of_its_task() -> None:
    rows, finished = [], []
    for n in range(6):
        rollout = make_rollout(f"r{n}", task={"domain": ("math", "code", "math")[n % 3]})
        finished.append(FinishedRollout(rollout, 1.0, [], []))
        rows.append(Trajectory(f"r{n}", [n, 7, 8], [0, 0, 1], [0, 0, -1], [-1, -1, 0]))
    batch = TrainBatch([0.0] * 6, ["g"] * 6, rows, list(range(6)))
    handles = {"math": Handle(), "code": Handle(), "idle": Handle()}
    teachers = make_teachers(handles, "domain")
    scored, metrics = await teachers.score(batch, finished)
    assert scored.rows == rows
    assert [row.tolist() for row in scored.teacher_logprobs or []] == [[-8.0]] * 6
    assert [handle.rows for handle in handles.values()] == [[0, 2, 3, 5], [1, 4], []]
    assert [metrics[f"teacher/rows/{name}"] for name in handles] == [4, 2, 0]
    assert (metrics["teacher/retries"], await teachers.counts()) == (0, {"teacher_retries": 0})
    by_function = make_teachers(handles, lambda task: task["domain"])
    assert (await by_function.score(batch, finished))[0].teacher_logprobs is not None
    with pytest.raises(ConfigError, match=r"the task of rollout r0 has no key 'field', by which teacher_of"):
        await make_teachers(handles, "field").score(batch, finished)
    with pytest.raises(ConfigError, match=r"gives the teacher 'law' for rollout r0, and there are: math"):
        await make_teachers(handles, lambda task: "law").score(batch, finished)
    with pytest.raises(ConfigError, match=r"teacher_of raised KeyError for rollout r0"):
        await make_teachers(handles, lambda task: task["field"]).score(batch, finished)


async def test_teachers_on_the_learners_ranks_are_only_chosen() -> None:
    batch, _ = prompted(3)
    finished = [
        FinishedRollout(make_rollout(row.rollout_id, task=n), None, [], [])
        for n, row in enumerate(batch.rows)
    ]
    settings = {name: RankTeacher(TeacherConfig(model=name)) for name in "ab"}
    teachers = Teachers(context(), settings, lambda task: "ba"[task % 2])
    scored, metrics = await teachers.score(batch, finished)
    assert scored.teacher_numbers == [1, 0, 1]
    assert metrics == {"teacher/rows/a": 1, "teacher/rows/b": 2}
    (shard,) = shard_batch(scored, PolicySettings(), 1)
    assert shard.rows.teachers == [1, 0, 1]


async def test_a_teacher_with_other_tokens_scores_spans_of_text() -> None:
    """Chats are in its own template, raw prompts as text."""
    own, other = map(AutoTokenizer.from_pretrained, (STARTER_MODEL, TOOL_MODEL))
    batch, finished = prompted(1)
    answer = own.encode("The answer", add_special_tokens=False)
    call = make_generation([0, 7], answer, key=finished[0].generations[0].key)
    for with_messages in (True, False):
        item = replace(finished[0], generations=[call], spans=finished[0].spans if with_messages else [])
        mask = [0, 0] + [1] * len(answer)
        row = Trajectory(call.key.rollout_id, [*call.prompt_ids, *answer], mask, np.zeros(len(mask)), mask)
        settings = ServedTeacher(
            TeacherConfig(model=TOOL_MODEL, tokenizer="aligned"),
            ServingSettings(TOOL_MODEL, EngineConfig(), "teacher"),
            aligned_to=STARTER_MODEL,
        )
        teacher = Teacher(context(), settings)
        teacher.service._router = Handle()
        scored, metrics = await teacher.score(replace(batch, rows=[row]), [item])
        (found,) = scored.teacher_logprobs or []
        ids = other.encode("The answer", add_special_tokens=False)
        assert len(found) == len(answer)
        assert np.nansum(found) == -sum(ids)
        assert np.count_nonzero(~np.isnan(found)) == len(ids)
        assert metrics["teacher/tokens_per_span"] > metrics["spans"]


async def test_the_mean_of_tokens_in_spans_is_over_the_rows_of_all_teachers() -> None:
    own = AutoTokenizer.from_pretrained(STARTER_MODEL)
    rows, finished = [], []
    for n, text in enumerate(("The answer", "12", "It is what it is")):
        call = make_generation([0], own.encode(text, add_special_tokens=False), key=make_key(f"r{n}"))
        rollout = make_rollout(f"r{n}", task={"domain": "ab"[n % 2]})
        finished.append(FinishedRollout(rollout, 1.0, [call], []))
        rows += build_trajectories([call]).rows
    batch = TrainBatch([0.0] * 3, ["g"] * 3, rows, list(range(3)))
    settings = ServedTeacher(
        TeacherConfig(model=TOOL_MODEL, tokenizer="aligned"),
        ServingSettings(TOOL_MODEL, EngineConfig(), "teacher"),
        aligned_to=STARTER_MODEL,
    )
    one, several = (
        Teachers(context(), dict.fromkeys(names, settings), choice)
        for names, choice in (("a", None), ("ab", "domain"))
    )
    for teacher in [*one._served, *several._served]:
        teacher.service._router = Handle()
    expected, found = [(await teachers.score(batch, finished))[1] for teachers in (one, several)]
    assert found["teacher/tokens_per_span"] == expected["teacher/tokens_per_span"] > 1
    assert set(found) == {*expected, "teacher/rows/a", "teacher/rows/b"}


async def test_a_lost_replica_costs_a_retry() -> None:
    lost = [ActorDiedError(), RayTaskError("score", "traceback", ActorDiedError())]  # of router, of replica
    handle = Handle(lambda call: lost[call - 2] if call in (2, 3) else None)
    teacher, notes = make_teacher(handle)
    scored, metrics = await teacher.score(make_batch(), [])
    assert scored.teacher_logprobs is not None
    assert [row.tolist() for row in scored.teacher_logprobs] == [[-8.0, -(n + 1.0)] for n in range(16)]
    assert metrics["teacher/retries"] == 2
    assert teacher.service.retries == 2
    assert "replica of the teacher was lost" in notes[0]


async def test_a_teacher_that_stays_away_ends_the_run() -> None:
    teacher, _ = make_teacher(Handle(lambda call: ActorDiedError()), timeout_s=0.01)
    with pytest.raises(ServingLostError, match=r"score 4 rows within 0\.01 s \(teacher\.timeout_s\)"):
        await teacher.score(make_batch(), [])


async def test_an_engine_that_refuses_tokens_says_why() -> None:
    refused = WeightSyncError("log-probs need 2 to 64 token ids")
    teacher, _ = make_teacher(Handle(lambda call: RayTaskError("score", "traceback", refused)))
    with pytest.raises(WeightSyncError, match="need 2 to 64 token ids"):
        await teacher.score(make_batch(), [])


def prompted(count: int) -> tuple[TrainBatch, list[FinishedRollout]]:
    """Return a batch of rollouts of one call each, and the rollouts. Rollout n asks n."""
    finished, rows = [], []
    for number in range(count):
        item = make_finished(calls=0)
        key = make_key(item.rollout.rollout_id)
        item.generations.append(make_generation([number, 7], [8, number + 1], key=key))
        attributes = {
            semconv.CALL_ID: key.call_id,
            semconv.DIALECT: "chat",
            semconv.INPUT_MESSAGES: json.dumps([{"role": "user", "content": number}]),
            semconv.REQUEST_PARAMETERS: "{}",
        }
        item.spans.append(
            Span.from_attributes(
                rollout_id=key.rollout_id, attempt_id="at-1", sequence_id=1, name="c", attributes=attributes
            )
        )
        finished.append(item)
        rows += build_trajectories(item.generations).rows
    return TrainBatch([0.0] * count, ["g"] * count, rows, list(range(count))), finished


def with_hint(task: Any, messages: list[Any]) -> list[Any]:
    """Add a message for odd questions only."""
    number = messages[0]["content"]
    return [{"role": "system", "content": 100 + number}, *messages] if number % 2 else messages


async def test_a_teacher_with_other_messages_scores_the_sampled_tokens() -> None:
    batch, finished = prompted(6)
    scored_rows: list[ScoredRow] = []

    class Seeing(Handle):
        async def remote(self, method: str, rows: list[Any]) -> list[Any]:
            scored_rows.extend(row for row in rows if isinstance(row, ScoredRow))
            return await super().remote(method, rows)

    teacher, notes = make_teacher(Seeing(), prompt=with_hint)
    teachers = Teachers(context(), {}, None)
    teachers._served = [teacher]
    scored, metrics = await teachers.score(batch, finished)
    assert scored.teacher_logprobs is not None
    assert [row.tolist() for row in scored.teacher_logprobs] == [[-8.0, -(n + 1.0)] for n in range(6)]
    read = sorted((row.ids.tolist() for row in scored_rows), key=lambda ids: ids[-1])
    hints = [[100 + n] if n % 2 else [] for n in range(6)]
    assert read == [[*hint, n, 7, 8, n + 1] for n, hint in enumerate(hints)]
    assert (metrics["teacher/changed_prompts"], metrics["teacher/added_tokens"]) == (3, 1)
    assert metrics["teacher/other_renderings"] == 0
    assert not notes


async def test_another_chat_template_is_counted_and_noted_once() -> None:
    batch, finished = prompted(4)
    for item in finished:  # the model's template put another token before its answer
        (call,) = item.generations
        item.generations[0] = replace(call, prompt_ids=[call.prompt_ids[0], 6])
    batch = replace(batch, rows=[build_trajectories(item.generations).rows[0] for item in finished])
    teacher, notes = make_teacher(Handle(), prompt=with_hint)
    for _ in range(2):
        _, metrics = await teacher.score(batch, finished)
        assert metrics["teacher/other_renderings"] == 2
    assert len(notes) == 1
    assert "chat template renders the messages of 2 rows otherwise" in notes[0]


async def test_a_row_that_is_too_long_with_the_teachers_prompt_is_an_error() -> None:
    batch, finished = prompted(2)
    teacher, _ = make_teacher(Handle(), prompt=lambda task, messages: 8 * messages, longest=8)
    with pytest.raises(RowTooLongError, match=r"has 11 tokens, and the teacher takes 8; return shorter"):
        await teacher.score(batch, finished)


async def test_a_prompt_function_that_hangs_ends_the_run() -> None:
    batch, finished = prompted(2)
    release = threading.Event()
    teacher, _ = make_teacher(Handle(), timeout_s=0.05, prompt=lambda task, messages: release.wait(60))
    with pytest.raises(TeacherPromptError, match=r"did not return within 0\.05 s for all of 2 rows"):
        await teacher.score(batch, finished)
    release.set()


class TaughtRun(FakeRun):
    """A run with a teacher, whose learners need its log-probs."""

    async def _open(self) -> None:
        await super()._open()
        self.teachers, _ = make_teacher(Handle())
        update = self.learners.learner.update

        async def update_with_scores(batch: TrainBatch) -> dict[str, float]:
            assert batch.teacher_logprobs is not None
            for row, scores in zip(batch.rows, batch.teacher_logprobs, strict=True):
                assert scores.tolist() == (-row.token_ids[row.prompt_length :]).tolist()
            return await update(batch)

        self.learners.learner.update = update_with_scores  # type: ignore[method-assign]


async def test_each_step_is_scored_before_its_update(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run, world.algorithm, world.reward_of = TaughtRun, rl.OPD, lambda rollout_id: 1.0
    rows = await live(world, teacher="t")
    steps = [row for row in rows if row["step"]]
    assert len(steps) == world.steps
    assert all(row["time/teacher_s"] > 0 and row["weights/version"] == row["step"] for row in steps)


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has another tokenizer .* differ, such as .*'aligned'.*rl\.SFT"):
        plan_teachers(rl.OPD(model=STARTER_MODEL, teacher=TOOL_MODEL), STARTER_MODEL)
    aligned = rl.OPD(model=STARTER_MODEL, teacher={"model": TOOL_MODEL, "tokenizer": "aligned"})
    assert aligned.needs_messages
    assert plan_teachers(aligned, STARTER_MODEL)["teacher"].aligned_to == STARTER_MODEL


def test_a_missing_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model folder"):
        plan_teachers(rl.OPD(model=STARTER_MODEL, teacher=tmp_path / "none"), STARTER_MODEL)
    assert plan_teachers(rl.GRPO(model=STARTER_MODEL), STARTER_MODEL) == {}


def test_a_model_that_the_run_itself_writes_is_refused(tmp_path: Path) -> None:
    shutil.copytree(STARTER_MODEL, tmp_path / "run" / "best")
    algorithm = rl.OPD(model=STARTER_MODEL, teacher=tmp_path / "run" / "best", n_steps=1)
    agent = rl.rollout(lambda task, llm: None)
    with pytest.raises(ConfigError, match=r"is in the run directory, .* copy it to another folder"):
        rl.Trainer(algorithm=algorithm, output_dir=tmp_path / "run")._plan(algorithm, agent, [1], None)
    found = rl.Trainer(algorithm=algorithm, output_dir=tmp_path / "next")._plan(algorithm, agent, [1], None)
    assert found.settings.training.teachers["teacher"].serving.model_path == str(tmp_path / "run" / "best")


def test_a_teacher_on_the_learners_ranks_has_no_engine(tmp_path: Path) -> None:
    algorithm = rl.OPD(model=STARTER_MODEL, teacher=STARTER_MODEL, divergence="js", n_steps=1)
    agent = rl.rollout(lambda task, llm: None)

    def planned(**settings: Any) -> Any:
        trainer = rl.Trainer(algorithm=algorithm, output_dir=tmp_path, **settings)
        return fit_scoring_models(trainer._plan(algorithm, agent, [1], None).settings)

    found = planned()
    assert not found.training.served_teachers
    assert found.training.algorithm.policy_settings().local_teachers == (str(STARTER_MODEL),)
    assert found.scoring_models == ()
    assert found.serving.engine.max_images > 0
    with pytest.raises(ConfigError, match=r"takes 2048 tokens, and rows of the policy have up to 4096"):
        fit_teacher(found.training.teachers["teacher"], TOOL_MODEL, EngineConfig(max_model_len=4096))
    with pytest.raises(ConfigError, match="a local learner has no ranks that a teacher could be on"):
        planned(learner={"kind": "local"})


def fitted(teacher: dict[str, Any], **policy: Any) -> EngineConfig:
    """Return the teacher's engine for a policy with such an engine."""
    algorithm = rl.OPD(model=STARTER_MODEL, teacher={"model": STARTER_MODEL} | teacher)
    planned = plan_teachers(algorithm, STARTER_MODEL)["teacher"]
    return fit_teacher(planned, STARTER_MODEL, EngineConfig(kind="transformers", **policy)).serving.engine


def test_a_teacher_in_vllm_may_give_as_many_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_models, "choose_engine", lambda engine: engine.kind)
    teacher = {"model": STARTER_MODEL, "kind": "vllm"}
    for top_k, limit in ((64, 64), (4, 20)):
        algorithm = rl.OPD(model=STARTER_MODEL, teacher=teacher, divergence="js", teacher_top_k=top_k)
        planned = plan_teachers(algorithm, STARTER_MODEL)["teacher"]
        assert (planned.top_k, planned.serving.engine.args) == (top_k, {"max_logprobs": limit})
    algorithm = rl.OPD(model=STARTER_MODEL, teacher=teacher, divergence="js", teacher_top_k=10**6)
    with pytest.raises(ConfigError, match=r"teacher_top_k=1000000 is not less than the \d+ tokens"):
        plan_teachers(algorithm, STARTER_MODEL)


def test_a_teacher_takes_rows_as_long_as_the_policys() -> None:
    found = fitted({"replicas": 3}, max_model_len=48)
    assert (found.max_model_len, found.max_concurrent, found.replicas) == (48, 1, 3)
    assert (found.kind, found.dtype) == ("transformers", "float32")
    on_gpu = fitted({"num_gpus": 1, "kind": "transformers"})
    assert on_gpu.dtype == "bfloat16"


def test_a_teacher_with_a_prompt_takes_longer_rows() -> None:
    prompt = {"prompt": with_hint}
    assert fitted(prompt).max_model_len == 2048  # the model's
    assert fitted(prompt, max_model_len=64).max_model_len == 1088
    own = {"max_model_len": 100}
    assert fitted(own, max_model_len=64).max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len is 100, and rows .* up to 128 .* set it to 128"):
        fitted(own, max_model_len=128)
    with pytest.raises(
        ConfigError, match=r"takes 2048 tokens, and its max_model_len is 4096; set it to 2048"
    ):
        fitted({"max_model_len": 4096})


def test_a_teacher_with_a_shorter_context_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(STARTER_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    with pytest.raises(ConfigError, match=r"takes 32 tokens, and rows .* up to 48 .*'max_model_len': 32"):
        fitted({"model": str(folder)}, max_model_len=48)


def test_a_run_has_the_teacher_of_its_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(STARTER_MODEL, tmp_path / "teacher")
    monkeypatch.chdir(tmp_path)
    algorithm = rl.OPD(model=STARTER_MODEL, teacher={"model": "teacher", "timeout_s": 5}, n_steps=1)
    trainer = rl.Trainer(algorithm=algorithm, output_dir=tmp_path / "run")
    run = trainer._plan(algorithm, rl.rollout(lambda task, llm: None), [1], None)
    settings = fit_scoring_models(run.settings)
    assert settings.serving.engine.max_images == 0
    with pytest.raises(ConfigError, match=r"engine\.max_images=3: a teacher in engines reads tokens alone"):
        without_images(EngineConfig(max_images=3))
    assert settings.resolved()["algorithm"]["teacher"]["model"] == str(tmp_path / "teacher")
    teacher = Teacher(context(name=settings.name), settings.training.teachers["teacher"])
    service = teacher.service
    assert (service._name, service._timeout_s) == (f"{settings.name}-teacher", 5)
    assert run.config(trainer._given)["algorithm"]["teacher"] == {
        "model": str(tmp_path / "teacher"),
        "timeout_s": 5,
    }
