"""Policy-gradient algorithms: their settings, rewards and batches, and batches."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from flat_settings import flat_settings
from unit_helpers import make_finished, make_generation, make_key

import raylight as rl
from raylight import algorithms
from raylight.components import IN_CODE
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import build_batch
from raylight.types import GREEDY, Failure, FinishedRollout

FAMILY = sorted(
    name
    for name in set(algorithms.__all__) - {"PolicyAlgorithm", "VERL", "algo"}
    if issubclass(getattr(algorithms, name), algorithms.PolicyAlgorithm)
)


REQUIRED: dict[str, dict[str, Any]] = {
    "GDPO": {"reward_weights": {"right": 1.0}},
    "OPD": {"teacher": "t"},
}
"""Settings that an algorithm cannot do without, besides the model."""


@pytest.mark.parametrize("name", FAMILY)
def test_every_algorithm_names_its_paper_and_requires_only_a_model(name: str) -> None:
    cls = getattr(rl.algorithms, name)
    assert cls is getattr(algorithms, name)
    assert "https://arxiv.org/abs/" in cls.__doc__
    algorithm = cls(model="m", **REQUIRED.get(name, {}))
    assert cls(**algorithm.model_dump()) == algorithm
    with pytest.raises(ConfigError, match=f"{name} has no setting 'group_sise'; it has: group_size"):
        cls(model="m", group_sise=2)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "GRPO",
            {
                "adv_estimator": "grpo",
                "loss_mode": "vanilla",
                "loss_agg_mode": "token-mean",
                "norm_adv_by_std": True,
            },
        ),
        (
            "DrGRPO",
            {"adv_estimator": "grpo", "norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
        ),
        (
            "DAPO",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "loss_agg_mode": "token-mean",
                "zero_variance_groups": "drop",
            },
        ),
        ("RLOO", {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"}),
        (
            "ReinforcePlusPlus",
            {"adv_estimator": "reinforce_plus_plus", "group_size": 1, "baseline_kind": "batch"},
        ),
        (
            "ReinforcePlusPlusBaseline",
            {"adv_estimator": "reinforce_plus_plus_baseline", "kl_type": "k2", "baseline_kind": "group"},
        ),
        ("ReMax", {"adv_estimator": "remax", "needs_greedy_rollouts": True, "group_size": 1}),
        ("OPO", {"adv_estimator": "opo", "needs_greedy_rollouts": False}),
        ("GPG", {"adv_estimator": "gpg", "loss_mode": "gpg"}),
        (
            "GSPO",
            {
                "loss_mode": "gspo",
                "clip_ratio_low": 3e-4,
                "clip_ratio_high": 4e-4,
                "loss_agg_mode": "seq-mean-token-mean",
            },
        ),
        ("CISPO", {"loss_mode": "cispo", "clip_ratio_low": 10.0, "clip_ratio_high": 0.2}),
        (
            "DPPO",
            {
                "loss_mode": "dppo_tv",
                "clip_ratio_low": 0.15,
                "clip_ratio_high": 0.15,
                "clip_ratio_c": 20.0,
                "bypass_mode": True,
            },
        ),
        (
            "SAPO",
            {"loss_mode": "sapo", "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "seq-mean-token-mean"},
        ),
        ("GMPO", {"loss_mode": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
        (
            "ClipCov",
            {"loss_mode": "clip_cov", "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
        ),
        ("KLCov", {"loss_mode": "kl_cov", "kl_cov_ratio": 2e-3, "ppo_kl_coef": 1.0}),
        (
            "PPO",
            {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95, "group_size": 1, "baseline_kind": "none"},
        ),
    ],
)
def test_an_algorithm_has_the_settings_of_its_paper(name: str, settings: dict[str, Any]) -> None:
    algorithm = getattr(algorithms, name)(model="m")
    properties = {name: getattr(algorithm, name) for name in ("baseline_kind", "needs_greedy_rollouts")}
    found = flat_settings(algorithm) | properties
    assert {key: found[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("name", "settings", "unread"),
    [
        ("RLOO", {"gamma": 0.9}, "gamma"),
        ("GRPO", {"lam": 0.9}, "lam"),
        ("RLOO", {"norm_adv_by_std": False}, "norm_adv_by_std"),
        ("SAPO", {"clip_ratio_high": 0.3}, "clip_ratio_high"),
        ("KLCov", {"clip_ratio_low": 0.1}, "clip_ratio_low"),
        ("GSPO", {"clip_ratio_c": 5.0}, "clip_ratio_c"),
        ("GRPO", {"tau_neg": 1.2}, "tau_neg"),
        ("GRPO", {"clip_cov_ratio": 0.1}, "clip_cov_ratio"),
        ("ClipCov", {"kl_cov_ratio": 0.1}, "kl_cov_ratio"),
        ("GRPO", {"kl_type": "k1"}, "kl_type"),
        ("PPO", {"kl_reward_type": "k3"}, "kl_reward_type"),
        ("PPO", {"kl_reward_coef": 0.1, "kl_horizon": 5}, "kl_horizon"),
        ("GRPO", {"loss_scale_factor": 8}, "loss_scale_factor"),
    ],
)
def test_a_setting_without_effect_is_an_error(name: str, settings: dict[str, Any], unread: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing reads {unread} \(read with "):
        getattr(algorithms, name)(model="m", **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("PPO", {"gamma": 0.9, "lam": 0.9}),
        ("ReinforcePlusPlus", {"gamma": 0.9}),
        ("GRPO", {"clip_ratio_c": 5.0, "clip_ratio_high": 0.3, "norm_adv_by_std": False}),
        ("DrGRPO", {"loss_scale_factor": 8}),
        ("GRPO", {"kl_coef": 0.1, "kl_type": "k2"}),
    ],
)
def test_a_setting_with_effect_is_accepted(name: str, settings: dict[str, Any]) -> None:
    found = flat_settings(getattr(algorithms, name)(model="m", **settings))
    assert {key: found[key] for key in settings} == settings


def test_k1_in_the_loss_is_refused_since_its_expected_gradient_is_zero() -> None:
    """d/dtheta E_p[log p - log q] at fixed samples is sum_x p dlog p = sum_x dp = 0, for any q."""
    torch = pytest.importorskip("torch")
    logits = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    p, log_q = logits.softmax(0).detach(), torch.tensor([-0.2, -2.0, -3.0], dtype=torch.float64)
    (p * (logits.log_softmax(0) - log_q)).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"expected gradient of 0 .*set kl_type='k2'.*kl_reward_coef"):
        algorithms.GRPO(model="m", kl_coef=0.1, kl_type="k1")


def test_a_function_of_the_user_may_read_any_setting() -> None:
    @rl.policy_loss("own_that_reads")
    def own_that_reads(log_prob: Any, advantages: Any, config: Any) -> Any:
        return -log_prob * advantages * config.tau_pos

    @rl.advantage_estimator("own_with_lam")
    def own_with_lam(token_level_rewards: Any, lam: float) -> Any:
        return token_level_rewards * lam

    rl.GRPO(model="m", loss_mode="own_that_reads", tau_pos=2.0)
    from raylight.algorithms.policy import PolicyAlgorithm

    PolicyAlgorithm(model="m", adv_estimator="own_with_lam", lam=0.5)


def test_ppo_has_a_critic() -> None:
    assert rl.PPO(model="m").critic is not None
    with pytest.raises(ConfigError, match="a critic need each other"):
        rl.PPO(model="m", critic=None)


# distillation


def opd(**settings: Any) -> rl.OPD:
    return rl.OPD(**{"model": "m", "teacher": "t"} | settings)


def test_a_teacher_is_a_model_or_its_settings(tmp_path: Path) -> None:
    assert opd().teacher == opd(teacher={"model": "t"}).teacher == rl.algorithms.TeacherConfig(model="t")
    assert opd(teacher=tmp_path).teacher.model == str(tmp_path)
    given = {"model": "t", "kind": "vllm", "replicas": 2, "num_gpus": 1, "args": {"tensor_parallel_size": 2}}
    algorithm = opd(teacher=given)
    assert algorithm.arguments()["teacher"] == given  # other settings keep the defaults of the hardware
    assert algorithm.teacher.engine().model_fields_set == {"kind", "replicas", "num_gpus", "args"}
    with pytest.raises(ConfigError, match="TeacherConfig has no setting 'url'"):
        opd(teacher={"model": "t", "url": "http://127.0.0.1"})
    with pytest.raises(ConfigError, match=r"TeacherConfig\.prompt: Input should be callable"):
        opd(teacher={"model": "t", "prompt": 17})
    with pytest.raises(ConfigError, match="must take two arguments, the task and the messages"):
        opd(teacher={"model": "t", "prompt": lambda messages: messages})
    with pytest.raises(ConfigError, match="adv_estimator 'opd' needs a teacher"):
        rl.algorithms.PolicyAlgorithm(model="m", adv_estimator="opd")


def with_answer(task: Any, messages: list[Any]) -> list[Any]:
    return [{"role": "system", "content": task["answer"]}, *messages]


def test_the_prompt_of_a_teacher_is_a_function_or_its_dotted_name() -> None:
    name = f"{__name__}:with_answer"
    for given in (with_answer, name):
        algorithm = opd(teacher={"model": "t", "prompt": given})
        assert algorithm.teacher.prompt is with_answer
        assert algorithm.with_epochs(2).teacher.prompt is with_answer
        assert algorithm.arguments()["teacher"] == {"model": "t", "prompt": name}
        assert algorithm.needs_messages
    assert not opd().needs_messages
    unnamed = opd(teacher={"model": "t", "prompt": lambda task, messages: messages})
    assert unnamed.arguments()["teacher"]["prompt"] == IN_CODE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turn_rewards": True}, "nothing reads turn_rewards without reward_coef"),
        ({"zero_variance_groups": "drop"}, "nothing reads zero_variance_groups without reward_coef"),
        ({"kl_reward_coef": 0.1}, "reads no rewards without reward_coef, so that kl_reward_coef"),
        (
            {"reward_coef": 1.0, "group_size": 1},
            "reward_coef adds the advantages of groups, and group_size=1",
        ),
        ({"lam": 0.9}, "nothing reads lam"),
        (
            {"divergence": "js", "teacher_top_k": 4, "teacher": {"model": "t", "tokenizer": "aligned"}},
            "a teacher with tokenizer='aligned' has others; set divergence='sampled'",
        ),
        ({"teacher": None}, "needs a teacher"),
        ({"teachers": {"a": "t"}}, "or several by name in teachers=.*, not both"),
        ({"teacher_of": "domain"}, "teachers and teacher_of need each other"),
        ({"teacher": None, "teachers": {"a": "t"}}, "teachers and teacher_of need each other"),
        (
            {
                "teacher": None,
                "teachers": {"a": {"model": "t", "kind": "learner"}, "b": {"model": "t", "num_cpus": 1}},
                "teacher_of": "domain",
                "divergence": "js",
                "teacher_top_k": 8,
            },
            "some teachers are on the learners' ranks and some in engines",
        ),
        ({"divergence": "js", "gamma": 1.0}, "nothing reads gamma with divergence='js'"),
        ({"divergence": "js", "log_ratio_clip": 5.0}, "nothing reads log_ratio_clip with divergence='js'"),
        ({"divergence": "forward_kl", "js_beta": 0.1}, "js_beta is read with divergence='js'"),
        ({"teacher_top_k": 8}, "teacher_top_k is read with a divergence over the vocabulary"),
        (
            {"divergence": "js", "teacher": {"model": "t", "kind": "vllm"}},
            "divergence='js' needs the teacher's whole distributions, and engines send only its most",
        ),
        ({"teacher": {"model": "t", "kind": "learner"}}, "'sampled' reads log-probs from an engine"),
        (
            {"divergence": "js", "teacher": {"model": "t", "kind": "learner", "num_gpus": 1, "replicas": 2}},
            "has no engine that reads num_gpus, replicas; remove them",
        ),
    ],
)
def test_settings_that_a_distillation_does_not_read_are_an_error(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opd(**settings)


def test_a_teacher_of_whole_distributions_is_on_the_learners_ranks() -> None:
    for teacher, top_k in (("t", None), ({"model": "t", "kind": "learner"}, 16)):
        algorithm = opd(divergence="reverse_kl", teacher_top_k=top_k, teacher=teacher)
        assert algorithm.has_local_teacher
        settings = pickle.loads(pickle.dumps(algorithm.policy_settings()))
        assert (settings.divergence, settings.local_teachers) == ("reverse_kl", ("t",))
        assert (settings.has_teacher, settings.needs_teacher_logprobs) == (True, False)
    assert not opd(divergence="js", teacher_top_k=16).has_local_teacher
    assert opd().policy_settings().local_teachers == ()
    assert opd().policy_settings().needs_teacher_logprobs


def teacher_of(task: Any) -> str:
    return str(task["domain"])


def test_tasks_choose_among_several_teachers() -> None:
    teachers = {"math": "m1", "code": {"model": "m2", "num_gpus": 1}}
    for choice in ("domain", teacher_of, f"{__name__}:teacher_of"):
        algorithm = opd(teacher=None, teachers=teachers, teacher_of=choice)
        assert list(algorithm.teacher_models) == ["math", "code"]
        assert algorithm.teacher_choice == ("domain" if choice == "domain" else teacher_of)
        written = algorithm.arguments()
        assert written["teachers"] == {"math": {"model": "m1"}, "code": {"model": "m2", "num_gpus": 1}}
        assert written["teacher_of"] == ("domain" if choice == "domain" else f"{__name__}:teacher_of")
        assert written["teacher"] is None
    local = opd(teacher=None, teachers={"a": "m1", "b": "m2"}, teacher_of="x", divergence="js")
    assert local.policy_settings().local_teachers == ("m1", "m2")
    moved = local.with_teachers({"a": local.teachers["b"], "b": local.teachers["a"]})
    assert moved.policy_settings().local_teachers == ("m2", "m1")


def test_a_teacher_needs_no_rewards_and_no_groups() -> None:
    unscored, equal = make_finished(None), [make_finished(1.0, group="g"), make_finished(1.0, group="g")]
    batch, report = build_batch([unscored, *equal], opd().batch_rules(LearnerConfig()))
    assert (batch.rewards, report.has_signal, report.unscored) == ([0.0, 1.0, 1.0], True, 0)
    batch, report = build_batch([unscored, *equal], opd(reward_coef=0.5).batch_rules(LearnerConfig()))
    assert (batch.rewards, report.has_signal, report.unscored) == ([1.0, 1.0], True, 1)
    failed = make_finished(failure=Failure(kind="agent", error="ValueError: no tool"))
    assert opd().reward_rules.reward(failed) is None


# DAPO's length penalty


def long_rollout(tokens: int) -> FinishedRollout:
    calls = [make_generation([1], [2] * 5), make_generation([1], [2] * (tokens - 5))]
    return dataclasses.replace(make_finished(1.0), generations=calls)


@pytest.mark.parametrize(("tokens", "reward"), [(10, 1.0), (80, 1.0), (90, 0.75), (100, 0.5), (150, 0.5)])
def test_the_penalty_for_length_rises_over_the_buffer(tokens: int, reward: float) -> None:
    dapo = rl.algorithms.DAPO(model="m", max_response_tokens=100, overlong_buffer=20, overlong_factor=0.5)
    assert dapo.reward_rules.reward(long_rollout(tokens)) == pytest.approx(reward)
    assert rl.algorithms.DAPO(model="m").reward_rules.reward(long_rollout(tokens)) == 1.0
    batch, _ = build_batch(
        [long_rollout(tokens), long_rollout(10), make_finished(0.0)], dapo.batch_rules(LearnerConfig())
    )
    assert batch.rewards == pytest.approx([reward, 1.0, 0.0])


@pytest.mark.parametrize(
    ("given", "rewards"),
    [
        ({}, [0.0, -1.0]),
        ({"credit": "agent"}, [0.0, 0.0, -1.0, -1.0]),
        ({"models": {"p": {}, "q": {}}}, [0.0, 0.0, -1.0, -1.0]),
        ({"models": {"p": {}, "q": {"trained": False}}}, [0.0, -1.0]),
    ],
)
def test_the_penalty_for_length_counts_the_whole_rollout(given: Any, rewards: list[float]) -> None:
    """Two agents, each with a model, sample 600 tokens each."""
    group = []
    for name, reward in (("a", 1.0), ("b", 0.0)):
        key = make_key(name)
        calls = [
            dataclasses.replace(
                make_generation([1, i], [3] * 600, key=key, start=i), agent=agent, model=model
            )
            for i, (agent, model) in enumerate((("x", "p"), ("y", "q")))
        ]
        group.append(dataclasses.replace(make_finished(reward, rollout_id=name), generations=calls))
    dapo = rl.algorithms.DAPO(model="m", group_size=2, max_response_tokens=1000, overlong_buffer=500, **given)
    assert build_batch(group, dapo.batch_rules(LearnerConfig()))[0].rewards == rewards


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_groups_are_compared_before_the_penalty_for_length(right: float) -> None:
    dapo = rl.algorithms.DAPO(model="m", max_response_tokens=16384)
    lengths = (9000, 11000, 12350, 12400)
    group = [
        dataclasses.replace(long_rollout(n), rollout=make_finished(right, group="g").rollout) for n in lengths
    ]
    group = [dataclasses.replace(item, reward=right) for item in group]
    assert len({dapo.reward_rules.reward(item) for item in group}) == 3
    batch, report = build_batch(group, dapo.batch_rules(LearnerConfig()))
    assert (batch.rewards, report.zero_variance, report.groups_without_signal) == ([], 4, 1)
    assert not dapo.batch_rules(LearnerConfig()).is_informative(group)
    kept, _ = build_batch(
        group, dapo.model_copy(update={"zero_variance_groups": "keep"}).batch_rules(LearnerConfig())
    )
    assert len(set(kept.rewards)) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overlong_factor": 0.5}, "nothing reads overlong_factor without max_response_tokens"),
        ({"max_response_tokens": 100}, "overlong_buffer=4096"),
    ],
)
def test_conflicting_length_settings_are_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.algorithms.DAPO(model="m", **given)


# batches


def test_an_algorithm_without_groups_trains_on_single_rollouts() -> None:
    single = [make_finished(1.0, group="a"), make_finished(0.0, group="b")]
    assert not build_batch(single, rl.GRPO(model="m").batch_rules(LearnerConfig()))[1].has_signal
    for algorithm in (rl.PPO(model="m"), rl.algorithms.ReinforcePlusPlus(model="m")):
        batch, report = build_batch(single, algorithm.batch_rules(LearnerConfig()))
        assert (batch.rewards, report.has_signal) == ([1.0, 0.0], True)


@pytest.mark.parametrize("kind", [rl.PPO, rl.algorithms.ReinforcePlusPlus])
def test_a_single_rollout_has_no_others_whose_rewards_it_could_equal(kind: type[rl.PPO]) -> None:
    rules = kind(model="m", zero_variance_groups="drop", max_rounds=2).batch_rules(LearnerConfig())
    single, equal = make_finished(1.0, group="a"), [make_finished(0.0, group="b") for _ in range(2)]
    batch, report = build_batch([single, *equal], rules)
    assert (batch.groups, report.zero_variance, report.groups_without_signal) == (["a"], 2, 1)
    assert rules.is_informative([single])
    assert not rules.is_informative(equal)
    assert not rules.is_informative([make_finished(failure=Failure(kind="agent", error="e"), group="a")])


def test_remax_drops_groups_whose_rewards_equal_the_greedy_rollouts() -> None:
    rules = rl.algorithms.ReMax(model="m", zero_variance_groups="drop").batch_rules(LearnerConfig())
    better, same = [[make_finished(1.0, group=g), greedy(r, g)] for g, r in (("a", 0.5), ("b", 1.0))]
    batch, report = build_batch([*better, *same], rules)
    assert (batch.groups, report.zero_variance) == (["a"], 1)
    assert [rules.is_informative(group) for group in (better, same, better[1:])] == [True, False, False]


def test_a_batch_follows_the_learners_limit() -> None:
    long = [
        dataclasses.replace(make_finished(r), generations=[make_generation([1], [2] * 9)]) for r in (0.0, 1.0)
    ]
    learner = LearnerConfig(max_row_tokens=4, long_rows="truncate")
    assert [
        len(row.token_ids) for row in build_batch(long, rl.GRPO(model="m").batch_rules(learner))[0].rows
    ] == [
        4,
        4,
    ]


def greedy(reward: float, group: str) -> FinishedRollout:
    item = make_finished(reward, group=group)
    rollout = item.rollout.model_copy(update={"metadata": {GREEDY: True}})
    return dataclasses.replace(
        item, rollout=rollout, generations=[make_generation([1], [2], temperature=0.0)]
    )


def test_the_greedy_rollouts_of_remax_are_baselines_and_not_trained() -> None:
    finished = [
        make_finished(1.0, group="a"),
        make_finished(0.0, group="b"),
        greedy(0.5, "a"),
        greedy(0.25, "b"),
    ]
    batch, report = build_batch(finished, rl.algorithms.ReMax(model="m").batch_rules(LearnerConfig()))
    assert (batch.rewards, batch.baselines, len(batch.rows), report.trained) == (
        [1.0, 0.0],
        [0.5, 0.25],
        2,
        2,
    )
