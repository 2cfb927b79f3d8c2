"""verl's engine under our batches: log-probs, loss, gradients and ranks against references written by hand."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import PROBE, make_batch, plain_logprobs, plain_probe
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.errors import MismatchError
from raylight.learner.settings import PolicySettings
from raylight.quickstart import STARTER_MODEL


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("rendezvous") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_policy(**settings):
    from raylight.learner.policy import Policy

    known = PolicySettings(**{"lr": 1e-3, "max_logprob_mismatch": 1e-3, **settings})
    return Policy(STARTER_MODEL, LearnerConfig(), known, total_steps=4)


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL)


@pytest.fixture(scope="module")
def exact(plain):
    with torch.no_grad():
        return [logprobs.tolist() for logprobs in plain_logprobs(plain)]


def expected_advantages(batch):
    """GRPO by hand: the distance to the group's mean in units of its standard deviation."""
    rewards, groups = np.array(batch.rewards), np.array(batch.groups)
    return [
        (reward - rewards[groups == group].mean()) / (rewards[groups == group].std(ddof=1) + 1e-6)
        for reward, group in zip(rewards, groups, strict=True)
    ]


def test_the_verl_that_is_installed_has_what_we_rely_on():
    from raylight.learner import verl_api

    for name in verl_api.__all__:
        assert getattr(verl_api, name) is not None
    assert callable(verl_api.get_adv_estimator_fn("grpo"))


def test_advantages_are_those_of_rollouts_and_a_rollout_of_many_rows_counts_once(exact):
    from raylight.learner.advantages import KlController, add_advantages
    from raylight.learner.rows import rows_of

    def advantages_of(batch):
        rows, settings = rows_of(batch), PolicySettings()
        add_advantages(batch, rows, rows, settings, KlController(settings))
        return [float(row.advantages[row.mask == 1].mean()) for row in rows]

    batch = make_batch(exact)
    advantages = advantages_of(batch)
    assert advantages == pytest.approx(expected_advantages(batch), abs=1e-5)
    doubled = make_batch(exact)
    doubled.rows.append(doubled.rows[0])
    doubled.owners.append(0)
    assert advantages_of(doubled) == pytest.approx([*advantages, advantages[0]])


def test_logprobs_loss_and_gradient_equal_a_plain_model(plain, exact):
    batch = make_batch(exact)
    metrics = make_policy(grad_clip=1e6).update(batch)
    assert metrics["mismatch/logprob_abs_max"] < 1e-5

    plain.zero_grad()
    logprobs = plain_logprobs(plain)
    terms = [-(p - p.detach()).exp() * a for p, a in zip(logprobs, expected_advantages(batch), strict=True)]
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    assert metrics["learner/pg_loss"] == pytest.approx(float(loss), abs=1e-5)
    assert metrics["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_two_ranks_measure_what_one_measures(tmp_path: Path):
    script = Path(__file__).parent / "ranks.py"

    def run(ranks: int) -> list[dict[str, float]]:
        command = [sys.executable, str(script)]
        tail = [str(ranks), str(tmp_path / f"meet-{ranks}")]
        started = [
            subprocess.Popen([*command, str(rank), *tail], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0] * ranks
        return json.loads(outputs[0].strip().splitlines()[-1])

    one, two = run(1), run(2)
    for alone, together in zip(one, two, strict=True):
        assert together["mismatch/logprob_abs_max"] < 1e-4
        for name in ("learner/grad_norm", "learner/pg_loss", "learner/kl", "learner/entropy"):
            assert together[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name
    probes = [name for name in one[1] if name.startswith("probe/")]
    assert [two[1][name] for name in probes] == pytest.approx([one[1][name] for name in probes], abs=1e-3)
    assert two[1]["probe/difference"] < 1e-4
    assert one[0]["learner/kl"] == pytest.approx(0, abs=1e-6)
    assert one[1]["learner/kl"] > 1e-4


def test_a_probe_tells_the_plain_models_logprobs_and_changes_nothing(plain, exact):
    policy = make_policy()
    assert policy.logprobs(PROBE) == pytest.approx(plain_probe(plain), abs=1e-5)
    assert len(policy.logprobs(PROBE)) == len(PROBE) - 1
    assert policy.update(make_batch(exact)) == pytest.approx(make_policy().update(make_batch(exact)), rel=1e-4)
    moved = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    moved.load_state_dict({name: torch.from_numpy(array) for name, array in policy.export().items()})
    after = policy.logprobs(PROBE)
    assert after == pytest.approx(plain_probe(moved), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(after, plain_probe(plain), strict=True)) > 1e-3


def test_what_is_exported_has_the_tied_output_layer_too(plain):
    assert plain.config.tie_word_embeddings
    weights = make_policy().export()
    assert (weights["lm_head.weight"] == weights["model.embed_tokens.weight"]).all()


def test_the_policy_moves_towards_what_was_rewarded(exact):
    policy = make_policy()
    batch = make_batch(exact)
    policy.update(batch)
    moved = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    moved.load_state_dict({name: torch.from_numpy(array) for name, array in policy.export().items()})
    with torch.no_grad():
        after = [float(logprobs.sum()) for logprobs in plain_logprobs(moved)]
    gains = [(a - sum(b)) * advantage for a, b, advantage in zip(after, exact, expected_advantages(batch), strict=True)]
    assert sum(gains) > 0


def test_all_mini_batches_are_compared_with_the_same_old_policy(exact):
    once, twice = make_policy().update(make_batch(exact)), make_policy(mini_batches=2).update(make_batch(exact))
    assert once["learner/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(twice["learner/ppo_kl"]) > 1e-5


@pytest.mark.parametrize(
    ("change", "version", "message"),
    [
        (lambda x: x - 0.1, 0, "differ by up to 0.1"),
        (lambda x: math.nan, 0, "differ by up to nan"),
        (lambda x: x, 7, "no token of the batch was sampled from weight version 0"),
    ],
)
def test_an_engine_that_is_not_this_policy_is_an_error(exact, change, version, message):
    wrong = [[change(x) for x in row] for row in exact]
    with pytest.raises(MismatchError, match=message):
        make_policy().update(make_batch(wrong, version=version))


def test_a_checkpoint_is_complete_or_absent(tmp_path: Path):
    policy = make_policy()
    folder = tmp_path / "checkpoint"
    for _ in range(2):  # the second replaces the first
        policy.save(str(folder))
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == 252_512
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
