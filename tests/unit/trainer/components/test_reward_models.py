"""The reward models of a run: their settings, requests to their replicas, and long conversations."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from run_settings import policy_settings
from store_helpers import open_box, reward_of

import raylight as rl
from raylight.config import EngineConfig
from raylight.engines.reward_model.scorer import ScoredConversation
from raylight.errors import (
    ConfigError,
    GroupRewardError,
    ModelNotFoundError,
    RewardModelError,
    ServingLostError,
)
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.cluster_fit.cluster_settings import fit_scoring_models
from raylight.trainer.cluster_fit.scoring_models import ENGINE, check_reward_model, plan_reward_models
from raylight.trainer.components.reward_models import RewardModels
from raylight.trainer.components.served_model import ServingContext
from raylight.trainer.loops.group_grader import GroupGrader
from raylight.trainer.spec.settings import RewardModelSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a reward model without its weights, which no check reads."""
    folder = tmp_path_factory.mktemp("reward_model")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(STARTER_MODEL, name), folder)
    change(folder, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"})
    return folder


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class Handle:
    """A deployment that scores a conversation by its number of messages, and may fail.

    Args:
        fail: the error of a call, by its number.
        length: tokens of each conversation.
    """

    def __init__(self, fail: Callable[[int], Exception | None] = lambda call: None, length: int = 8) -> None:
        self.call, self.fail, self.length = self, fail, length
        self.sizes: list[int] = []

    async def remote(self, method: str, part: list[rl.rewards.RewardModelInput], truncate: bool) -> list[Any]:
        assert method == "score_conversations"
        self.sizes.append(len(part))
        error = self.fail(len(self.sizes))
        await asyncio.sleep(0)
        if error is not None:
            raise error
        scores = [float(len(one.messages)) if truncate or self.length <= 64 else None for one in part]
        return [ScoredConversation(score, self.length) for score in scores]


def served(
    folder: Path, handle: Handle, **settings: Any
) -> tuple[rl.rewards.ScoringModel, RewardModels, list[str]]:
    model = rl.rewards.reward_model(str(folder), max_tokens=64, **settings)
    notes: list[str] = []
    found = RewardModels(ServingContext("run-1", "s3cr3t", notes.append, True), plan_reward_models(model))
    found._served[model].service._router = handle
    return model, found, notes


CHATS = [rl.rewards.RewardModelInput([{"role": "user", "content": "x"}] * n) for n in range(1, 41)]


async def test_a_large_group_is_divided(folder: Path) -> None:
    model, models, _ = served(folder, handle := Handle())
    assert await models.scorers[model](CHATS) == [float(n) for n in range(1, 41)]
    assert sorted(handle.sizes) == [8, 16, 16]
    assert models.metrics() == {"reward_model/reward_model/retries": 0.0}


async def test_a_lost_replica_costs_a_retry(folder: Path) -> None:
    lost = {2: ActorDiedError(), 3: RayTaskError("score", "traceback", ActorDiedError())}
    model, models, notes = served(folder, Handle(lost.get), name="taste")
    assert await models.scorers[model](CHATS) == [float(n) for n in range(1, 41)]
    assert await models.counts() == {"reward_model_taste_retries": 2}
    assert "a replica of the reward model taste was lost" in notes[0]


async def test_what_the_replicas_cannot_do_is_an_error_of_its_group_or_of_the_run(folder: Path) -> None:
    rejected = RayTaskError("score", "traceback", RewardModelError("the chat template rejects it"))
    model, models, _ = served(folder, Handle(lambda call: rejected))
    with pytest.raises(RewardModelError, match="template rejects it"):
        await models.scorers[model](CHATS)
    broken = RayTaskError("score", "traceback", RuntimeError("CUDA error"))
    model, models, _ = served(folder, Handle(lambda call: broken))
    with pytest.raises(
        ServingLostError, match=r"reward_model failed: RuntimeError: CUDA error.*can be resumed"
    ):
        await models.scorers[model](CHATS)
    models._served[model].service._loop = asyncio.new_event_loop()
    with pytest.raises(RewardModelError, match="async def"):
        await models.scorers[model](CHATS)
    models._served[model].service._loop.close()
    away = served(folder, Handle(lambda call: ActorDiedError()), timeout_s=0.05)
    own = [{"role": "user", "content": "Who?"}]

    async def scored(group: list[rl.rewards.GroupRollout]) -> list[float | None]:
        return await away[0].score([own for _ in group])

    async with open_box() as box:
        ids = []
        for reward in (0.5, 0.1):
            await box.store.enqueue_rollout("task", group_id="a")
            rollout = await box.again()
            ids.append(rollout.rollout_id)
            await box.store.finish_attempt(rollout, "succeeded", spans=[reward_of(rollout, reward)])
        finished = await box.store.collect(ids)
        grader = GroupGrader(box.store, scored, print, scorers=away[1].scorers)
        with pytest.raises(ServingLostError, match=r"did not score 2 conversations within 0\.05 s"):
            await grader.grade_all(finished)
        notes: list[str] = []
        not_served = GroupGrader(box.store, scored, notes.append)
        assert [item.reward for item in await not_served.grade_all(finished)] == [None, None]
        assert "is not served" in notes[0]
        answered = GroupGrader(box.store, scored, print, scorers={away[0]: models_of_one(1.5)})
        graded = await answered.grade_all(await box.store.collect(ids))
        assert [item.rewards["primary"] for item in graded] == [1.5, 1.5]


def models_of_one(score: float) -> Any:
    async def scorer(conversations: list[rl.rewards.RewardModelInput]) -> list[float | None]:
        return [score] * len(conversations)

    return scorer


@pytest.mark.parametrize(("treatment", "score"), [("drop", None), ("truncate", 1.0)])
async def test_long_conversations_are_counted_and_noted_once(
    folder: Path, treatment: str, score: float | None
) -> None:
    model, models, notes = served(folder, Handle(length=65), long_conversations=treatment)
    for _ in range(2):
        assert await models.scorers[model](CHATS[:1]) == [score]
    name = {"drop": "dropped", "truncate": "truncated"}[treatment]
    assert models.metrics()[f"reward_model/reward_model/{name}"] == 2.0
    assert len(notes) == 1
    assert "has 65 tokens of the reward model reward_model, which takes 64" in notes[0]


async def test_a_long_conversation_ends_the_run_by_default(folder: Path) -> None:
    model, models, _ = served(folder, Handle(length=65))
    with pytest.raises(GroupRewardError, match=r"has 65 tokens .* takes 64: set its long_conversations="):
        await models.scorers[model](CHATS[:1])


def test_the_limit_of_a_conversation(folder: Path) -> None:
    assert check_reward_model(str(folder), None) == 2048
    assert check_reward_model(str(folder), 64) == 64
    assert check_reward_model(str(folder), 10_000) == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "is a Qwen3ForCausalLM, without a head .* rl.rewards.ruler",
        ),
        ({"architectures": None}, "is a no architecture"),
        ({"id2label": {"0": "bad", "1": "good"}}, r"has 2 labels \(bad, good\), and a reward is one number"),
        ({"model_type": "unheard"}, "cannot be loaded"),
    ],
)
def test_a_model_without_a_scalar_head_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        plan_reward_models(rl.rewards.reward_model(str(tmp_path)))


def test_a_model_without_a_chat_template_or_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        plan_reward_models(rl.rewards.reward_model(str(tmp_path)))
    with pytest.raises(ModelNotFoundError):
        plan_reward_models(rl.rewards.reward_model(str(tmp_path / "none")))
    one, other = rl.rewards.reward_model(str(folder)), rl.rewards.reward_model(str(folder))
    with pytest.raises(ConfigError, match="named reward_model, reward_model; give each another name"):
        plan_reward_models(rl.rewards.RewardSum({"a": one, "b": other}))
    assert [
        found.serving.name for found in plan_reward_models(rl.rewards.RewardSum({"a": one, "b": one}))
    ] == ["reward-model"]


def test_a_run_and_an_evaluation_have_the_models_of_their_group_reward(folder: Path, tmp_path: Path) -> None:
    model = rl.rewards.reward_model(
        str(folder), replicas=3, num_cpus=0.25, max_tokens=64, max_batch_tokens=99
    )
    algorithm = rl.GRPO(model=STARTER_MODEL, n_steps=1)
    trainer = rl.Trainer(
        algorithm=algorithm, output_dir=tmp_path, group_reward=rl.rewards.RewardSum({"t": model})
    )
    fit = trainer._plan(algorithm, rl.rollout(lambda task, llm: None), [1], None)
    (found,) = fit_scoring_models(fit.settings).reward_models
    engine = found.serving.engine
    assert (engine.kind, engine.replicas, engine.num_cpus, engine.max_model_len) == (ENGINE, 3, 0.25, 64)
    assert engine.args == {"max_batch_tokens": 99}
    assert fit.settings.resolved()["reward_models"][0]["replicas"] == 3


def test_rewards_of_turns_need_an_algorithm_that_reads_them(tmp_path: Path) -> None:
    function = rl.rewards.each_turn(rl.rewards.matches("a"))
    algorithm = rl.GRPO(model=STARTER_MODEL, n_steps=1)
    trainer = rl.Trainer(algorithm=algorithm, output_dir=tmp_path, group_reward=function)
    with pytest.raises(ConfigError, match="set turn_rewards=True of GRPO"):
        trainer._plan(algorithm, rl.rollout(lambda task, llm: None), [1], None)


def on_gpu(folder: Path, **settings: Any) -> RewardModelSettings:
    (found,) = plan_reward_models(rl.rewards.reward_model(str(folder), num_gpus=0.5, **settings))
    return found


def test_the_gpus_of_a_reward_model_are_its_own(folder: Path) -> None:
    settings = policy_settings(
        STARTER_MODEL, EngineConfig(kind="transformers"), reward_models=(on_gpu(folder, replicas=2),)
    )
    (found,) = fit_scoring_models(settings).reward_models
    assert (found.serving.engine.dtype, found.serving.engine.max_model_len) == ("bfloat16", 2048)
    assert [model.name for model in settings.scoring_models] == ["reward-model"]
