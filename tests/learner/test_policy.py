"""The policy on verl's engine: log-probs, loss and gradients against references."""

import copy
import itertools
import math
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from ranks import ANSWERS, PROBE, PROMPTS, gradients_of, make_batch, plain_logprobs, plain_probe, same
from transformers import AutoModelForCausalLM

from raylight.config import LearnerConfig
from raylight.errors import CheckpointError, MismatchError, NonFiniteGradientError
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL

pytestmark = pytest.mark.usefixtures("one_rank")


def make_policy(learner=None, **settings):
    from raylight.learner.updates.policy import Policy

    known = PolicySettings(**{"lr": 1e-3, "max_logprob_mismatch": 1e-3, **settings})
    return Policy(STARTER_MODEL, LearnerConfig(**learner or {}), known, total_steps=4)


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL)


@pytest.fixture(scope="module")
def exact(plain):
    with torch.no_grad():
        return [logprobs.tolist() for logprobs in plain_logprobs(plain)]


def expected_advantages(batch):
    """Reference of GRPO: the distance from the group's mean in units of its standard deviation."""
    rewards, groups = np.array(batch.rewards), np.array(batch.groups)
    return [
        (reward - rewards[groups == group].mean()) / (rewards[groups == group].std(ddof=1) + 1e-6)
        for reward, group in zip(rewards, groups, strict=True)
    ]


def test_the_installed_verl_has_all_names_of_the_api():
    from raylight.learner import verl_api  # raises ImportError for a missing one

    assert callable(verl_api.get_adv_estimator_fn("grpo"))


def test_advantages_are_per_rollout_and_a_rollout_of_many_rows_counts_once(exact):
    from raylight.experience.batches.shards import shard_batch
    from raylight.learner.losses.advantages import KlController, add_advantages
    from raylight.learner.tokens.rows import build_rows

    def advantages_of(batch):
        settings = PolicySettings()
        (shard,) = shard_batch(batch, settings, 1)
        rows = list(build_rows(shard.rows, batch.owners).values())
        add_advantages(shard.outline, rows, settings, KlController(settings))
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


@pytest.mark.parametrize(("rows", "micro_batch"), [(1, 16384), (3, 48)])
def test_kl_and_entropy_are_per_rollout_if_rows_are_averaged(plain, exact, rows, micro_batch):
    one_row = make_batch(exact)
    batch = TrainBatch(
        one_row.rewards,
        one_row.groups,
        [row for row in one_row.rows for _ in range(rows)],
        [owner for owner in one_row.owners for _ in range(rows)],
    )
    settings = {
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_coef": 0.5,
        "entropy_coef": 0.25,
        "grad_clip": 1e6,
    }
    policy = make_policy(
        bypass_mode=True,
        max_logprob_mismatch=50.0,
        learner={"max_tokens_per_micro_batch": micro_batch},
        **settings,
    )
    moved = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in [*policy.engine.module.parameters(), *moved.parameters()]:
            parameter.mul_(1.02)
    moved.zero_grad()
    metrics = policy.update(batch)

    kl, entropy, loss = [], [], []
    for prompt, answer, ref, advantage in zip(
        PROMPTS, ANSWERS, exact, expected_advantages(one_row), strict=True
    ):
        logprobs = moved(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        now, then = logprobs.gather(-1, torch.tensor(answer)[:, None])[:, 0], torch.tensor(ref)
        kl.append((then - now).exp() - (then - now) - 1)
        entropy.append(-(logprobs.exp() * logprobs).sum(-1))
        ratio = (now - then).exp()
        lost = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        loss.append(lost.clamp(max=-3 * advantage) if advantage < 0 else lost)
    pg, k, h = (torch.stack([of.mean() for of in terms]).mean() for terms in (loss, kl, entropy))
    (pg + 0.5 * k - 0.25 * h).backward()
    norm = torch.stack([p.grad.norm() for p in moved.parameters() if p.grad is not None]).norm()
    measured = [metrics[f"learner/{name}"] for name in ("pg_loss", "kl", "entropy")]
    per_token = [float(torch.cat(terms).mean()) for terms in (kl, entropy)]
    assert measured == pytest.approx([float(pg), *per_token], rel=1e-3)
    assert metrics["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_logprobs_equal_a_plain_model_and_change_nothing(plain, exact):
    policy = make_policy()
    assert policy.logprobs(PROBE) == pytest.approx(plain_probe(plain), rel=1e-5, abs=1e-5)
    assert len(policy.logprobs(PROBE)) == len(PROBE) - 1
    assert policy.update(make_batch(exact)) == pytest.approx(
        make_policy().update(make_batch(exact)), rel=1e-4
    )
    moved = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    moved.load_state_dict({name: torch.from_numpy(array) for name, array in policy.export().items()})
    after = policy.logprobs(PROBE)
    assert after == pytest.approx(plain_probe(moved), rel=1e-5, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(after, plain_probe(plain), strict=True)) > 1e-3


def test_an_export_contains_the_tied_output_layer(plain):
    assert plain.config.tie_word_embeddings
    weights = make_policy().export()
    assert (weights["lm_head.weight"] == weights["model.embed_tokens.weight"]).all()


def test_the_policy_moves_towards_rewarded_answers(exact):
    policy = make_policy()
    batch = make_batch(exact)
    policy.update(batch)
    moved = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    moved.load_state_dict({name: torch.from_numpy(array) for name, array in policy.export().items()})
    with torch.no_grad():
        after = [float(logprobs.sum()) for logprobs in plain_logprobs(moved)]
    gains = [
        (a - sum(b)) * advantage
        for a, b, advantage in zip(after, exact, expected_advantages(batch), strict=True)
    ]
    assert sum(gains) > 0


def test_all_mini_batches_have_the_same_old_policy(exact):
    once, twice = (
        make_policy().update(make_batch(exact)),
        make_policy(mini_batches=2).update(make_batch(exact)),
    )
    assert once["learner/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(twice["learner/ppo_kl"]) > 1e-5


@pytest.mark.parametrize(
    ("given", "has_all"),
    [
        ({}, True),
        ({"mini_batches": 2}, True),
        ({"mini_batches": 2, "ppo_epochs": 2, "bypass_mode": True}, False),
        ({"mini_batches": 2, "rollout_is": "token", "max_staleness": 1, "proximal": "loglinear"}, False),
        ({"ppo_epochs": 2, "bypass_mode": True}, True),
    ],
)
def test_records_have_the_log_probs_before_the_update_or_none(exact, given, has_all):
    """Without a pass before the update, only the first optimizer step computes them in time."""
    engine = [[logprob - 0.25 for logprob in row] for row in exact]
    policy = make_policy(lr=1e-2, max_logprob_mismatch=1.0, **given)
    policy.update(make_batch(engine))
    records = sorted(policy.row_records, key=lambda record: record.index)
    known = [record.index for record in records if not np.isnan(record.logprobs).any()]
    assert len(known) == (8 if has_all else 4)
    for record, expected in zip(records, exact, strict=True):
        if record.index in known:
            assert record.logprobs == pytest.approx(expected, abs=1e-4)
        else:
            assert np.isnan(record.logprobs).all()


def test_passes_on_a_cpu_have_bounded_activations_and_add_up_to_the_same_update(exact, monkeypatch):
    whole, parts = make_policy(), make_policy()
    from raylight.learner.tokens import micro_batch

    wanted, gradients = gradients_of(whole.engine), gradients_of(parts.engine)
    expected = whole.update(make_batch(exact))
    monkeypatch.setattr(micro_batch, "HOST_ACTIVATIONS", 1)
    monkeypatch.setattr(micro_batch, "SMALL_PASS", 12)
    compute, passes = parts.engine._compute, []
    monkeypatch.setattr(
        parts.engine, "_compute", lambda batch, *more: (passes.append(batch), compute(batch, *more))[1]
    )
    found = parts.update(make_batch(exact))
    assert len(passes) > 1
    for name in ("learner/pg_loss", "learner/grad_norm", "learner/entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
    # not the weights: Adam's first step has one size for every gradient, whatever part of it is rounding
    same(gradients, wanted)


def broken_gradients(policy, steps):
    """Make the gradients of these steps, counted from 0, NaN."""
    step, count = policy.engine.optimizer_step, itertools.count()

    def broken():
        if next(count) in steps:
            for parameter in policy.engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(math.nan)
        return step()

    policy.engine.optimizer_step = broken


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(exact):
    policy = make_policy(mini_batches=4)
    broken_gradients(policy, {1, 3})
    metrics = policy.update(make_batch(exact))
    assert metrics["learner/skipped_steps"] == 2
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(np.isfinite(array).all() for array in policy.export().values())


def test_three_non_finite_gradients_in_a_row_raise_and_change_nothing(exact):
    policy = make_policy()
    before = policy.export()
    broken_gradients(policy, range(9))
    for version in range(2):
        assert policy.update(make_batch(exact, version=version))["learner/skipped_steps"] == 1
    with pytest.raises(NonFiniteGradientError, match="3 times in a row"):
        policy.update(make_batch(exact, version=2))
    after = policy.export()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x - 0.1, r"differ by 0.1 on average \(allowed: 0.001\)"),
        (lambda x: math.nan, "a log-prob of engine or learner is NaN"),
    ],
)
def test_an_engine_with_other_weights_raises(exact, change, message):
    wrong = [[change(x) for x in row] for row in exact]
    with pytest.raises(MismatchError, match=message):
        make_policy().update(make_batch(wrong))


def test_tokens_of_other_versions_are_counted(exact):
    metrics = make_policy().update(make_batch(exact, version=7))
    assert metrics["mismatch/stale_fraction"] == 1


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"kl_reward_coef": 0.1, "kl_target": 1.0}, {"kl_reward_coef": 0.01}, 0.01),
        ({}, {"kl_reward_coef": 0.1, "kl_target": 1.0}, 0.1),
        ({"kl_reward_coef": 0.1, "kl_target": 1.0}, {"kl_reward_coef": 0.1, "kl_target": 1.0}, 0.1 * 1.2),
    ],
)
def test_a_state_restores_an_adaptive_kl_coefficient_only(then, now, expected, tmp_path: Path):
    from raylight.learner.state import state, state_files

    before, after = make_policy(**then), make_policy(**now)
    before._kl.update(100.0, 10_000)  # far above the target
    state_files.write(state.collect(before), str(tmp_path))
    state.load(after, str(tmp_path))
    assert after._kl.coef == pytest.approx(expected)


def test_training_does_not_change_copies_of_the_state(exact):
    from raylight.learner.state import state, state_files

    policy = make_policy(max_logprob_mismatch=50.0)
    policy.update(make_batch(exact))
    copies = state_files.HostCopies()

    def full(tensors):
        """Return full tensors, by name."""
        return {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
            for name, tensor in tensors.items()
        }

    live, copied = state.collect(policy), copies.copy(state.collect(policy))
    before = full(live)
    policy.update(make_batch(exact, version=1))
    after = full(live)
    assert full(copied).keys() == before.keys()
    for name, tensor in full(copied).items():
        assert torch.equal(tensor, before[name]), name
    changed = {name.split("/")[-1] for name in before if not torch.equal(before[name], after[name])}
    assert {"exp_avg", "exp_avg_sq", "step", "model.embed_tokens.weight"} <= changed
    again = full(copies.copy(state.collect(policy)))
    assert all(
        torch.equal(again[name], after[name]) for name in before if "/" in name and "random" not in name
    )


def test_an_optimizer_without_steps_stays_without(exact, tmp_path: Path):
    """In critic warm-up, torch's own functions would set the moments to zero and the step count to 1."""
    from raylight.learner.state import state, state_files

    fresh, trained = make_policy(), make_policy()
    state_files.write(state.collect(fresh), str(tmp_path))
    assert not fresh.engine.optimizer.state
    trained.update(make_batch(exact))
    assert trained.engine.optimizer.state
    state.load(trained, str(tmp_path))
    assert not trained.engine.optimizer.state
    assert trained.update(make_batch(exact)) == pytest.approx(fresh.update(make_batch(exact)), rel=1e-6)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path):
    from raylight.learner.state import state, state_files

    policy, left = make_policy(), tmp_path / "left"
    folder = tmp_path / "state"
    state_files.write(state.collect(policy), str(folder))

    class Runs:
        def __reduce__(self):
            return Path.touch, (left,)

    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match="damaged, or was not written by raylight"):
        state.load(policy, str(folder))
    assert not left.exists()


def test_a_state_in_an_object_store(exact):
    from raylight.learner.state import state, state_files

    trained, other = make_policy(), make_policy()
    trained.update(make_batch(exact))
    url = "memory://states/step-1/training"
    state_files.write(state.collect(trained), url)
    state.load(other, url)
    assert other.logprobs(PROBE) == trained.logprobs(PROBE)
    MemoryFileSystem.store.clear()
    with pytest.raises(FileNotFoundError):
        state.load(other, url)


def test_a_checkpoint_is_complete_or_absent(tmp_path: Path):
    from raylight.learner.model.weights import save_model

    policy = make_policy()
    folder = tmp_path / "checkpoint"
    for _ in range(2):  # the second replaces the first
        save_model(policy.engine, str(folder))
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == 252_512
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_few_functions_lie_between_an_update_and_the_loss(exact, monkeypatch):
    """The loss, two of LearnerGroup, two of LearnerActor and 8 of the driver make 16 from `Trainer.fit`."""
    from raylight.learner.losses import policy_loss as losses

    stacks = []
    original = losses.PolicyLoss.__call__

    def record(self, *args, **kwargs):
        folder = Path(losses.__file__).parents[1]
        stacks.append([f.name for f in traceback.extract_stack() if folder in Path(f.filename).parents])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(losses.PolicyLoss, "__call__", record)
    make_policy().update(make_batch(exact))
    assert stacks[0] == ["update", "update_shard", "_step", "train"]
