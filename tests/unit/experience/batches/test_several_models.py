"""Batches and ledger of a run with several models: each is compared with itself, its tokens are counted."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_finished, make_generation, make_key

import raylight as rl
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import BatchReport, TrainBatch, build_batch
from raylight.experience.batches.ledger import Ledger
from raylight.experience.settings.policy_settings import ModelConfig
from raylight.experience.trajectories.row_rules import RowRules, trained_rows
from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.types import FinishedRollout, RolloutTokens, Span, TokenTotals

MODELS = {"planner": {}, "coder": {"lr": 1e-3}, "judge": {"trained": False}}


def emitted(value: float, at: float) -> Span:
    core = rl.emit_reward(value, propagate=False)
    return Span.from_core_fields(core).model_copy(update={"start_time": at})


def play(calls: list[str], reward: float | None, group: str = "g", **more: Any) -> FinishedRollout:
    """A rollout with a call of two tokens by each of these models; no call continues another."""
    item = make_finished(reward, group=group, calls=0, **more)
    generations = [
        replace(
            make_generation([1, n], [7, 8], key=make_key(item.rollout.rollout_id), start=float(n)), model=name
        )
        for n, name in enumerate(calls)
    ]
    return replace(item, generations=generations, rewards={} if reward is None else {"primary": reward})


def play_of_agents(reward: float) -> FinishedRollout:
    """A rollout in which agent a calls the planner, and then b the coder."""
    item = play(["planner", "coder"], reward)
    calls = [replace(call, agent=name) for call, name in zip(item.generations, "ab", strict=True)]
    return replace(item, generations=calls)


def build(finished: list[FinishedRollout], **settings: Any) -> tuple[TrainBatch, BatchReport]:
    algorithm = rl.GRPO(model="m", models=MODELS, **settings)
    return build_batch(finished, algorithm.batch_rules(LearnerConfig()))


def test_each_model_gets_its_rows_and_groups_and_other_models_none() -> None:
    batch, report = build(
        [play(["planner", "coder", "judge", "coder"], 1.0), play(["planner", "policy", "coder"], 0.0)]
    )
    assert batch.groups == ["g/planner", "g/coder", "g/planner", "g/coder"]
    assert batch.models == ["planner", "coder", "planner", "coder"]
    assert report.other_models == 2
    assert report.groups == 2
    parts = batch.parts_of_models()
    assert sorted(parts) == ["coder", "planner"]
    coder = parts["coder"]
    assert coder.rows == [1, 2, 4]
    assert coder.batch.rows == [batch.rows[row] for row in coder.rows]
    assert (coder.batch.owners, coder.batch.rewards) == ([0, 0, 1], [1.0, 0.0])
    assert (batch.lengths, coder.batch.lengths) == ([2, 4, 2, 2], [4, 2])
    assert report.trained_by_model == {"planner": 4, "coder": 6}


def test_a_model_whose_groups_have_equal_rewards_has_no_part() -> None:
    batch, report = build(
        [
            *(play(["planner", "coder"], reward) for reward in (1.0, 0.0)),
            *(play(["coder"], 0.5, group="other") for _ in range(2)),
        ]
    )
    assert batch.signals == {"planner", "coder"}
    batch, report = build(
        [play(["planner", "coder"], 1.0), play(["planner"], 0.0), play(["coder"], 1.0)], group_size=2
    )
    assert batch.signals == {"planner"}
    assert list(batch.parts_of_models()) == ["planner"]
    assert report.has_signal
    assert report.trained_by_model == {"planner": 4}
    assert report.trained_tokens == 4, "tokens of a model without an update are not in a loss"


def test_turn_rewards_and_weights_of_agents_stay_with_their_models() -> None:
    algorithm = rl.GRPO(model="m", models=MODELS, credit="agent", agent_weights={"a": 2.0})
    finished = [play_of_agents(reward) for reward in (1.0, 0.0)]
    batch, _ = build_batch(finished, algorithm.batch_rules(LearnerConfig()))
    assert batch.groups == ["g/a/planner", "g/b/coder"] * 2
    parts = batch.parts_of_models()
    assert parts["planner"].batch.weights == [2.0, 2.0]
    assert parts["coder"].batch.weights == [1.0, 1.0]


def test_a_turn_reward_after_a_models_call_is_its_agents_alone() -> None:
    algorithm = rl.GRPO(model="m", models=MODELS, credit="agent", turn_rewards=True)
    finished = [
        replace(play_of_agents(reward), spans=[emitted(0.25, at=2.5), emitted(reward, at=9.0)])
        for reward in (1.0, 0.0)
    ]
    batch, _ = build_batch(finished, algorithm.batch_rules(LearnerConfig()))
    parts = batch.parts_of_models()
    assert [turn.value for turn in parts["coder"].batch.turn_rewards] == [0.25, 0.25]
    assert parts["planner"].batch.turn_rewards == []


def test_calls_of_two_models_form_no_row_together() -> None:
    first = make_generation([1], [2, 3])
    second = replace(make_generation([1, 2, 3, 4], [5]), model="coder")
    assert len(build_trajectories([first, second]).rows) == 2
    assert len(build_trajectories([first, replace(second, model=first.model)]).rows) == 1


def test_the_rules_of_a_finished_run_are_those_of_its_models() -> None:
    rules = RowRules.from_config({"algorithm": {"models": MODELS}})
    assert rules.models == ("planner", "coder")
    item = play(["planner", "judge", "coder"], 1.0)
    assert [call.model for call in trained_rows(item, rules).trajectories.calls] == ["planner", "coder"]
    assert RowRules.from_config({"algorithm": {"models": None}}).models == ()


CALLS = st.lists(st.sampled_from(["planner", "coder", "judge", "policy@step-3"]), max_size=4)
PLAYED = st.lists(
    st.tuples(CALLS, st.sampled_from([None, 0.0, 1.0]), st.sampled_from("ab")), min_size=1, max_size=8
)


@given(PLAYED)
def test_the_ledger_closes_in_all_and_for_each_model(
    played: list[tuple[list[str], float | None, str]],
) -> None:
    finished = [
        play(calls, reward, group, status="succeeded" if reward is not None else "failed")
        for calls, reward, group in played
    ]
    if not any(reward is not None and {"planner", "coder"} & {*calls} for calls, reward, _ in played):
        return
    _, report = build(finished)
    ledger = Ledger()
    tokens = {item.rollout.rollout_id: 2 * len(item.generations) for item in finished}
    ledger.take(finished, report, {name: RolloutTokens(count, 0, 0) for name, count in tokens.items()})
    resumed = Ledger()
    resumed.load_state_dict(ledger.state_dict())
    row = resumed.row(TokenTotals(sum(tokens.values()), 0, 0))
    assert row.unaccounted == 0
    found = resumed.model_metrics()
    names = {name: name for name in ("planner", "coder", "judge")} | {"opponent": "policy@step-3"}
    for name, served in names.items():
        sampled = 2 * sum(calls.count(served) for calls, _, _ in played)
        own = {
            fate: found.get(f"ledger/model/{name}/{fate}", 0.0)
            for fate in ("sampled", "trained", "untrained")
        }
        assert own["sampled"] == sampled == own["trained"] + own["untrained"]
        assert own["trained"] == report.trained_by_model[name]
    assert sum(report.trained_by_model.values()) == row.trained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": {"a b": {}}}, "'a b' cannot name a model"),
        ({"models": {"policy": {}}}, "'policy' cannot name a model"),
        ({"models": {"a": {"trained": False}}}, "none is trained"),
        ({"models": {"a": {"trained": False, "lr": 1e-3}}}, "nothing reads lr of a model with trained=False"),
        ({"models": {"a": {"adapter": "x"}}, "kl_coef": 0.1}, "KL divergence of 'a'"),
        ({"models": {"a": {"rank": 3}}}, "rank"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.GRPO(model="m", **settings)


@pytest.mark.parametrize("kind", [rl.algorithms.ReMax, rl.algorithms.PPO])
def test_algorithms_with_a_critic_or_greedy_baselines_have_one_model(kind: Any) -> None:
    with pytest.raises(ConfigError, match="several models have neither a critic, a teacher nor greedy"):
        kind(model="m", models=MODELS)


def test_the_folder_of_an_adapter_does_not_depend_on_the_process(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    algorithm = rl.GRPO(model="m", models={"a": "outputs/a", "b": {"adapter": "~/b"}})
    assert algorithm.models["a"].adapter == str(tmp_path / "outputs" / "a")
    assert algorithm.models["b"].adapter == str(tmp_path / "home" / "b")


def test_each_model_has_the_settings_of_the_algorithm_but_for_its_own(tmp_path: Any) -> None:
    algorithm = rl.GRPO(model="m", models=MODELS | {"old": tmp_path}, lr=5e-4, kl_coef=0.0, mini_batches=2)
    assert algorithm.models["old"] == ModelConfig(adapter=str(tmp_path))
    assert algorithm.policy_settings("planner") == algorithm.policy_settings()
    own = algorithm.policy_settings("coder")
    assert (own.lr, own.mini_batches) == (1e-3, 2)
    assert (algorithm.trained_models, algorithm.untrained_models) == (("planner", "coder", "old"), ("judge",))
    again = type(algorithm)(**algorithm.arguments())
    assert again.models == algorithm.models
