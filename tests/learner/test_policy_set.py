"""Several models on shared ranks against each model on separate ranks."""

import json

import numpy as np
import policy_set_ranks as shared
import pytest
import torch
from peft import PeftModel
from policy_set_ranks import MODELS, adapters_of, joint_batch, learner_config, make_set, part_of
from rank_processes import run_ranks
from ranks import PROBE, plain_probe
from transformers import AutoModelForCausalLM

from raylight.errors import CheckpointError, ConfigError
from raylight.learner.protocol import ModelSettings
from raylight.learner.state.checkpoints import TrainingStates
from raylight.quickstart import STARTER_MODEL

RANKS = 2


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def alone():
    """Adapter and metrics of each model that is trained alone, after two updates."""
    from raylight.learner.updates.policy import Policy

    found = {}
    for name, model in MODELS.items():
        torch.manual_seed(0)
        policy = Policy(STARTER_MODEL, learner_config(), model.policy, total_steps=8)
        metrics = [policy.update(part_of(name, version)) for version in range(2)]
        found[name] = policy.export_adapter()[1], metrics
    return found


def test_each_model_is_trained_as_if_it_were_alone(alone):
    policies = make_set()
    metrics = [policies.update(joint_batch(version)) for version in range(2)]
    for name, adapter in adapters_of(policies).items():
        expected, expected_metrics = alone[name]
        for key, values in expected.items():
            np.testing.assert_allclose(adapter[key], values, rtol=0, atol=1e-7)
        for own, reference in zip(metrics, expected_metrics, strict=True):
            for key, value in reference.items():
                assert own[f"model/{name}/{key}"] == pytest.approx(value, abs=1e-5), key
    assert policies.version == 2
    loss = "learner/pg_loss"
    assert metrics[1][loss] == pytest.approx(np.mean([metrics[1][f"model/{n}/{loss}"] for n in MODELS]))


def test_a_model_without_a_signal_keeps_its_weights_and_gets_the_version():
    policies = make_set()
    before = adapters_of(policies)
    metrics = policies.update(joint_batch(signals=("coder",)))
    after = adapters_of(policies)
    assert all(np.array_equal(after["planner"][key], values) for key, values in before["planner"].items())
    assert not all(np.array_equal(after["coder"][key], values) for key, values in before["coder"].items())
    assert "model/planner/learner/pg_loss" not in metrics
    assert {policy.version for policy in policies.policies.values()} == {1}


def test_records_of_rows_have_their_places_in_the_whole_batch():
    policies, batch = make_set(), joint_batch()
    policies.update(batch)
    assert sorted(record.index for record in policies.row_records) == list(range(len(batch.rows)))
    for record in policies.row_records:
        row = batch.rows[record.index]
        assert record.start == row.prompt_length
        assert len(record.advantages) == len(row.token_ids) - row.prompt_length


def test_the_log_probs_of_a_model_are_those_of_its_exported_adapter(tmp_path):
    from raylight.learner.ranks.model_rank import ModelRank

    policies = make_set()
    rank = ModelRank(policies)
    policies.update(joint_batch())
    rank.save(str(tmp_path / "checkpoint"))
    probes = {}
    for name in MODELS:
        folder = tmp_path / "checkpoint" / name
        base = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
        adapted = plain_probe(PeftModel.from_pretrained(base, folder / "adapter").eval())
        merged = plain_probe(AutoModelForCausalLM.from_pretrained(folder))
        probes[name] = rank.logprobs(PROBE, name)
        assert probes[name] == pytest.approx(adapted, abs=1e-5)
        assert probes[name] == pytest.approx(merged, abs=1e-5)
        assert rank.export_adapter(name)[0] == 1
    assert probes["planner"] != pytest.approx(probes["coder"], abs=1e-4)


def test_a_model_starts_from_an_adapter(tmp_path):
    from raylight.learner.ranks.model_rank import ModelRank
    from raylight.learner.updates.policy_set import PolicySet

    trained = make_set()
    trained.update(joint_batch())
    ModelRank(trained).save(str(tmp_path))
    folder = tmp_path / "coder" / "adapter"
    settings = {
        "new": ModelSettings(MODELS["coder"].policy),
        "old": ModelSettings(MODELS["coder"].policy, str(folder)),
    }
    policies = PolicySet(STARTER_MODEL, learner_config(), settings, 2)
    expected = trained.use("coder").export_adapter()[1]
    started = policies.use("old").export_adapter()[1]
    assert all(np.array_equal(started[key], values) for key, values in expected.items())
    assert not any(
        values.any() for key, values in policies.use("new").export_adapter()[1].items() if "lora_B" in key
    )

    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4}))
    with pytest.raises(ConfigError, match=r"rank 4, alpha 4 .* asks for rank 4, alpha 16"):
        PolicySet(STARTER_MODEL, learner_config(), settings, 2)
    for other in ({"use_rslora": True}, {"alpha_pattern": {"q_proj": 64}}):
        (folder / "adapter_config.json").write_text(json.dumps(config | other))
        with pytest.raises(ConfigError, match=f"was trained with {next(iter(other))}"):
            PolicySet(STARTER_MODEL, learner_config(), settings, 2)
    settings["old"] = ModelSettings(MODELS["coder"].policy, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="LoRA adapter in peft's format"):
        PolicySet(STARTER_MODEL, learner_config(), settings, 2)


def test_a_state_of_other_models_is_refused(tmp_path):
    from raylight.learner.state import state, state_files
    from raylight.learner.updates.policy import Policy

    several, single = make_set(), Policy(STARTER_MODEL, learner_config(), MODELS["coder"].policy, 2)
    state_files.write(state.collect(several), str(tmp_path / "several"))
    state_files.write(state.collect(single), str(tmp_path / "single"))
    with pytest.raises(CheckpointError, match="of a run with several models"):
        state.load(single, str(tmp_path / "several"))
    with pytest.raises(
        CheckpointError, match=r"has the models of a run with one, and this run coder, planner"
    ):
        state.load(several, str(tmp_path / "single"))
    fewer = {name: model for name, model in MODELS.items() if name == "coder"}
    with pytest.raises(CheckpointError, match="has the models coder, planner, and this run coder;"):
        state.load(shared_set(fewer), str(tmp_path / "several"))


def shared_set(models):
    from raylight.learner.updates.policy_set import PolicySet

    return PolicySet(STARTER_MODEL, learner_config(), models, 2)


@pytest.mark.slow(parts=4)
def test_two_ranks_agree_with_one_and_continue_from_a_state(alone, tmp_path):
    folder = str(tmp_path / "states")
    content = TrainingStates(folder).new_content(1)
    ((first, second), _), (other, _) = run_ranks(shared.main, RANKS, folder, content)
    assert [result[0] for result in other] == [None, None]
    for adapters, probes, version in (first, second):
        assert version == 2
        for name in MODELS:
            for key, values in alone[name][0].items():
                np.testing.assert_allclose(adapters[name][key], values, rtol=0, atol=1e-5)
        assert probes["planner"] != pytest.approx(probes["coder"], abs=1e-4)
    for name in MODELS:
        assert first[1][name] == second[1][name] == other[0][1][name]
