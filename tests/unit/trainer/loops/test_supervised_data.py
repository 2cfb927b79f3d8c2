"""Examples of supervised training from files and lists, and bad ones."""

import json
import shutil

import pytest
import yaml

import raylight as rl
from raylight.config import LearnerConfig
from raylight.errors import ConfigError, DatasetError, RowTooLongError
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.loops.supervised_data import load_supervised_data
from raylight.trainer.spec.run_file import load_run_file

GOOD = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}


def load(data, learner=None, kind=rl.SFT, model=STARTER_MODEL, **settings):
    algorithm = kind(model=model, data=data, **settings)
    return load_supervised_data(algorithm, model, LearnerConfig(**learner or {}))


def test_a_file_and_a_list_give_the_same_rows(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(GOOD) + "\n")
    from_file, from_list = load(str(file)).train, load([GOOD]).train
    (one,), (other,) = from_file[0].answers[0], from_list[0].answers[0]
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.mask.tolist()[-2:] == [1, 1]
    assert one.mask.sum() == 2  # the digit, and the end of the turn


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no tasks|is empty"),
        ('{"messages": [}\n', r"line 1 is not valid JSON"),
        (json.dumps({"prompt": "x"}) + "\n", r"example 1 of .*a demonstration is"),
        (json.dumps({"messages": GOOD["messages"][:1]}) + "\n", r"example 1 of .*no answer of the assistant"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(tmp_path, text, error):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(DatasetError, match=error):
        load(file)


def test_a_missing_file_and_an_empty_list_are_errors(tmp_path):
    with pytest.raises(DatasetError, match="there is no file"):
        load(str(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match="data is empty"):
        load([])


def test_long_examples_follow_the_learners_rule():
    long = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "9" * 40}]}
    with pytest.raises(RowTooLongError, match="example 2 of data has a row of"):
        load([GOOD, long], {"max_row_tokens": 30})
    kept = load([GOOD, long], {"max_row_tokens": 30, "long_rows": "drop"})
    assert len(kept.train) == 1
    assert "1 examples were left out and 0 truncated" in kept.notes[0]
    cut = load([GOOD, long], {"max_row_tokens": 30, "long_rows": "truncate"})
    assert [example.tokens <= 30 for example in cut.train] == [True, True]
    with pytest.raises(DatasetError, match="no examples within"):
        load([long], {"max_row_tokens": 30, "long_rows": "drop"})


def test_a_model_without_a_chat_template_is_an_error(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(STARTER_MODEL, model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load([GOOD], model=str(model))


def test_settings_of_rollouts_are_not_read_with_messages():
    with pytest.raises(ConfigError, match="nothing reads min_reward, best_of_group: data is not a run"):
        load([GOOD], min_reward=0.5, best_of_group=True)


@pytest.mark.parametrize("with_prompt", [True, False])
def test_a_pair_learns_what_follows_the_prompt(with_prompt):
    question, right = GOOD["messages"]
    wrong = {"role": "assistant", "content": "3"}
    pair = {"chosen": [right], "rejected": [wrong], "prompt": [question]}
    if not with_prompt:
        pair = {"chosen": [question, right], "rejected": [question, wrong]}
    (example,) = load([pair], kind=rl.DPO).train
    (chosen,), (rejected,) = example.answers
    assert chosen.mask.sum() == rejected.mask.sum() == 2
    assert (chosen.tokens != rejected.tokens).sum() == 1


@pytest.mark.parametrize(
    ("pair", "error"),
    [
        (GOOD, "a pair is"),
        ({"prompt": [], "chosen": GOOD["messages"], "rejected": GOOD["messages"]}, "are equal"),
        ({"chosen": GOOD["messages"], "rejected": GOOD["messages"][:1]}, "rejected has no answer"),
    ],
)
def test_a_bad_pair_is_an_error(pair, error):
    with pytest.raises(DatasetError, match=error):
        load([pair], kind=rl.DPO)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"patience": 2}, "patience needs validations"),
        ({"best": "val/reward"}, "best='val/reward' is not one of: val/loss"),
        ({"min_delta": 0.1}, "nothing reads min_delta"),
        ({"learning_rate": 1e-4}, "no setting 'learning_rate'"),
    ],
)
def test_wrong_settings_are_errors(settings, error):
    with pytest.raises(ConfigError, match=error):
        rl.SFT(model="m", data="d.jsonl", **settings)


def test_smoothing_needs_a_loss_that_reads_it():
    with pytest.raises(ConfigError, match="nothing reads label_smoothing with loss_type='ipo'"):
        rl.DPO(model="m", data="d.jsonl", loss_type="ipo", label_smoothing=0.1)


def test_a_trainer_rejects_what_a_run_without_rollouts_does_not_read(tmp_path):
    algorithm = rl.SFT(model=STARTER_MODEL, data=[GOOD])
    with pytest.raises(ConfigError, match="nothing reads agent or dataset, engine, n_runners"):
        rl.Trainer(algorithm=algorithm, engine={}, n_runners=2, output_dir=tmp_path).fit([{"a": 1}])
    with pytest.raises(ConfigError, match=r"learner\.kind='local' needs an engine"):
        rl.Trainer(algorithm=algorithm, learner={"kind": "local"}, output_dir=tmp_path).fit()


def test_a_run_file_needs_no_agent_and_a_run_writes_one(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text((json.dumps(GOOD) + "\n") * 5)
    file = tmp_path / "run.yaml"
    settings = {"name": "SFT", "model": STARTER_MODEL, "data": str(data), "batch_size": 2, "n_epochs": 2}
    file.write_text(yaml.safe_dump({"algorithm": settings, "output_dir": str(tmp_path / "out")}))
    run_file = load_run_file(file, ["algorithm.lr=1e-4"])
    assert run_file.read_data() == (None, None)
    trainer = rl.Trainer(**run_file.trainer_arguments())
    fit = trainer._plan(trainer.algorithm, None, None, None)
    assert fit.total_steps == 6
    assert fit.state_config["tasks"]["number"] == 5
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(fit.config(trainer._given)))
    again = load_run_file(written)
    assert again.output_dir == str(tmp_path / "out")
    assert rl.Trainer(**again.trainer_arguments()).algorithm == trainer.algorithm
    assert again.resolved()["algorithm"]["lr"] == 1e-4


def test_examples_given_in_code_are_not_written(tmp_path):
    trainer = rl.Trainer(algorithm=rl.SFT(model=STARTER_MODEL, data=[GOOD]), output_dir=tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(trainer._plan(trainer.algorithm, None, None, None).config(trainer._given)))
    with pytest.raises(ConfigError, match=r"algorithm\.data was given in code"):
        load_run_file(file)
