"""Group rewards: results, terms, sums, rubrics, and relative ranking by a judge behind a real server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_group import judge_llm, rollout, scores_of

import raylight as rl
from raylight.errors import ConfigError, GroupRewardError, JudgeError
from raylight.rewards.group import GroupRollout, call_group_reward, recording
from raylight.rewards.judge import find_json
from raylight.semconv import OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT

GROUP = [rollout(0, "Goethe", 1.0, 2), rollout(1, "Schiller", 0.0, 6), rollout(2, "Goethe, a poet", 1.0, 10)]


def rewards_of(function: Any, group: list[GroupRollout] = GROUP) -> list[dict[str, float]]:
    return asyncio.run(call_group_reward(function, group))


@contextmanager
def judging(script: Any) -> Iterator[Any]:
    from scripted_models import serve_script

    with serve_script(script) as models:
        yield models


def test_a_group_reward_may_be_any_function() -> None:
    async def slow(group: list[GroupRollout]) -> list[float]:
        return [len(item.answer) for item in group]

    class Callable:
        async def __call__(self, group: list[GroupRollout]) -> tuple[Any, ...]:
            return ({"best": True, "other": 2}, None, 0.5)

    assert rewards_of(slow) == [{"primary": 6.0}, {"primary": 8.0}, {"primary": 14.0}]
    assert rewards_of(Callable()) == [{"best": 1.0, "other": 2.0}, {}, {"primary": 0.5}]
    assert rewards_of(lambda group: [item.reward for item in group])[1] == {"primary": 0.0}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], "returned 2 rewards for 3 rollouts"),
        (1.0, "returned a float; return a list"),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, "returned a dict; return a list"),
        ("abc", "returned a str; return a list"),
        ([1.0, float("nan"), 0.0], "returned a wrong reward"),
        ([1.0, "good", 0.0], "returned a wrong reward"),
        ([{}, 1.0, 1.0], "returned a wrong reward"),
    ],
)
def test_a_wrong_result_raises(result: Any, message: str) -> None:
    with pytest.raises(GroupRewardError, match=message):
        rewards_of(lambda group: result)


def test_a_rollout_shows_its_conversations() -> None:
    item = GROUP[0]
    assert (item.task, item.reward, item.answer, item.sampled_tokens) == ("Faust", 1.0, "Goethe", 2)
    assert [message["role"] for message in item.messages] == ["system", "user", "assistant"]
    empty = GroupRollout(type(item.finished)(item.finished.rollout, None, []))
    assert (empty.conversations, empty.messages, empty.answer) == ([], [], "")


def test_terms() -> None:
    assert rewards_of(rl.rewards.matches("Goethe")) == [{"primary": 1.0}, {"primary": 0.0}, {"primary": 1.0}]
    assert rewards_of(rl.rewards.matches("Goethe", full=True))[2] == {"primary": 0.0}
    assert rewards_of(rl.rewards.length_penalty(10, 8)) == [
        {"primary": 0.0},
        {"primary": -0.5},
        {"primary": -1.0},
    ]
    assert rewards_of(rl.rewards.RelativeLength()) == [{"primary": 0.5}, {"primary": 0.0}, {"primary": -0.5}]
    assert rewards_of(rl.rewards.RelativeLength(), GROUP[:1]) == [{"primary": 0.0}]
    assert rewards_of(rl.rewards.agent_reward("missing")) == [{}, {}, {}]
    for wrong in (
        lambda: rl.rewards.matches("("),
        lambda: rl.rewards.length_penalty(10, 11),
        lambda: rl.rewards.each_rollout(3),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            wrong()


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([None, 0.0, 1.0])), min_size=1, max_size=8))
def test_relative_length_orders_good_rollouts_and_never_rewards_bad_ones(drawn: list[Any]) -> None:
    group = [rollout(number, "x", reward, tokens) for number, (tokens, reward) in enumerate(drawn)]
    found = rl.rewards.RelativeLength()(group)
    good = sorted(
        (item.sampled_tokens, -score) for item, score in zip(group, found, strict=True) if item.reward
    )
    assert [score for _, score in good] == sorted(score for _, score in good)
    assert all(score <= 0 for item, score in zip(group, found, strict=True) if not item.reward)
    assert all(-0.5 <= score <= 0.5 for score in found)


def test_a_sum_keeps_the_names_of_its_terms() -> None:
    total = rl.rewards.RewardSum(
        {"right": rl.rewards.agent_reward(), "short": rl.rewards.RelativeLength()}, weights={"short": 0.5}
    )
    assert rewards_of(total) == [
        {"total": 1.25, "right": 1.0, "short": 0.5},
        {"total": 0.0, "right": 0.0, "short": 0.0},
        {"total": 0.75, "right": 1.0, "short": -0.5},
    ]
    assert rewards_of(total, [rollout(0, "x")]) == [{}]
    for terms, weights in (
        ({}, None),
        ({"total": rl.rewards.agent_reward()}, None),
        ({"right": rl.rewards.agent_reward()}, {"rihgt": 1.0}),
        ({"right": rl.rewards.agent_reward()}, {"right": float("inf")}),
    ):
        with pytest.raises(ConfigError):
            rl.rewards.RewardSum(terms, weights)


def test_ruler_ranks_a_group_by_one_request() -> None:
    def script(model: str, text: str) -> str:
        return scores_of(text, lambda answer: 0.9 if answer == "Goethe" else len(answer) / 100)

    with judging(script) as models, recording() as records:
        assert rewards_of(rl.rewards.ruler(judge_llm(models.url))) == [
            {"ruler": 0.9},
            {"ruler": 0.08},
            {"ruler": 0.14},
        ]
        assert rewards_of(rl.rewards.ruler(judge_llm(models.url), name="rank"), GROUP[1:2]) == [
            {"rank": 0.08}
        ]
    (_, prompt), _ = models.requests
    assert prompt.count("Who wrote Faust?") == prompt.count("<shared>") == 1
    assert prompt.count("<attempt number=") == 3
    assert [span.attributes[OPERATION_NAME] for span in records.spans] == ["ruler", "rank"]
    assert json.loads(records.spans[0].attributes[OPERATION_INPUT])[1]["content"] == prompt
    assert "scores" in records.spans[0].attributes[OPERATION_OUTPUT]


@pytest.mark.parametrize(
    "wrong",
    [
        "I like the first one",
        '{"scores": [{"attempt": 1, "score": 1.0}]}',
        '{"scores": [{"attempt": 1, "score": 1}, {"attempt": 1, "score": 1}, {"attempt": 2, "score": 0}]}',
        '{"scores": [{"attempt": 1, "score": 7}, {"attempt": 2, "score": 1}, {"attempt": 3, "score": 0}]}',
        '{"scores": [{"attempt": 1, "score": true}, {"attempt": 2, "score": 1}, {"attempt": 3, "score": 0}]}',
        '{"scores": null}',
        "[]",
    ],
)
def test_an_unreadable_answer_is_asked_for_again(wrong: str) -> None:
    def script(model: str, text: str) -> str:
        return scores_of(asked, lambda answer: 0.5) if "cannot be used" in text else wrong

    with judging(script) as models:
        judge = rl.rewards.ruler(judge_llm(models.url))
        asked = '<attempt number="1">\n{"content": ""}\n</attempt>' * 3
        assert rewards_of(judge) == [{"ruler": 0.5}] * 3
        assert len(models.requests) == 2
        with pytest.raises(JudgeError, match="could be read in 1 attempts"):
            rewards_of(rl.rewards.ruler(judge_llm(models.url), attempts=1))


def test_a_judge_that_does_not_answer_fails() -> None:
    with (
        judging(lambda model, text: 400) as models,
        recording() as records,
        pytest.raises(JudgeError, match="did not answer: BadRequestError"),
    ):
        rewards_of(rl.rewards.ruler(judge_llm(models.url)))
    assert records.spans[0].status.status_code == "ERROR"
    for llm in (rl.LLM(model="judge"), rl.LLM(endpoint="http://x/v1"), "gpt-5"):
        with pytest.raises(ConfigError, match="the judge is"):
            rl.rewards.ruler(llm)  # type: ignore[arg-type]


def test_a_rubric_weighs_judged_and_checked_criteria() -> None:
    def script(model: str, text: str) -> str:
        shown = text.partition("<attempt>")[2]
        right, rude = "Goethe" in shown, "poet" in shown
        return json.dumps(
            {"scores": {"right": {"score": float(right)}, "rude": {"reason": "", "score": 0.5 * rude}}}
        )

    criteria = [
        rl.rewards.Criterion("right", "Names the author.", weight=3.0),
        rl.rewards.Criterion("rude", "Calls him a poet.", weight=-2.0),
        rl.rewards.Criterion("short", check=lambda item: float(item.sampled_tokens <= 6)),
    ]
    with judging(script) as models:
        found = rewards_of(rl.rewards.rubric(criteria, judge_llm(models.url)))
    assert found == [
        {"rubric": 1.0, "right": 1.0, "rude": 0.0, "short": 1.0},
        {"rubric": 0.25, "right": 0.0, "rude": 0.0, "short": 1.0},
        {"rubric": 0.5, "right": 1.0, "rude": 0.5, "short": 0.0},
    ]
    assert len(models.requests) == 3
    only_checks = rl.rewards.rubric([criteria[2]])
    assert rewards_of(cloudpickle.loads(cloudpickle.dumps(only_checks)))[2] == {"rubric": 0.0, "short": 0.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: rl.rewards.Criterion("", "x"),
        lambda: rl.rewards.Criterion("a", "x", weight=0.0),
        lambda: rl.rewards.Criterion("a", "x", weight=float("nan")),
        lambda: rl.rewards.Criterion("a"),
        lambda: rl.rewards.rubric([rl.rewards.Criterion("a", "x")]),
        lambda: rl.rewards.rubric(
            [rl.rewards.Criterion("a", check=float)], rl.LLM(endpoint="http://x/v1", model="m")
        ),
        lambda: rl.rewards.rubric(
            [rl.rewards.Criterion("a", "x", weight=-1.0)], rl.LLM(endpoint="http://x/v1", model="m")
        ),
        lambda: rl.rewards.rubric([rl.rewards.Criterion("rubric", check=float)]),
        lambda: rl.rewards.rubric([]),
    ],
)
def test_a_rubric_that_cannot_be_combined_raises(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_the_last_object_of_an_answer_is_read() -> None:
    assert find_json('{"a": 1} and then {"b": {"c": 2}} }') == {"b": {"c": 2}}
    with pytest.raises(ValueError, match="no JSON object"):
        find_json("{'a': 1")
