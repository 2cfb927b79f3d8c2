"""Export of a run's rollouts as training data, and its way back into SFT and DPO."""

import contextlib
import json
import shutil
import sqlite3

import pytest
from command_runner import CliRunner
from recorded_run import HOSTILE, record_call, record_run
from store_helpers import Clock, open_box, reward_of

import raylight as rl
from raylight.cli import app
from raylight.config import LearnerConfig
from raylight.errors import ConfigError, DatasetError, StoreError
from raylight.quickstart import STARTER_MODEL, TOOL_MODEL
from raylight.store.payloads import encode_payload
from raylight.trainer.loops.supervised_data import load_supervised_data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import asyncio

    return asyncio.run(record_run(tmp_path_factory.mktemp("runs") / "run-1"))


def export(run, *options: str) -> list[dict]:
    result = CliRunner().invoke(app, ["export-traces", str(run.folder), *options])
    assert result.exception is None, result.exception
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_conversation_of_two_calls_is_one_line(run):
    lines = export(run, "--format", "sft", "--split", "train")
    assert len(lines) == 3
    assert [message["role"] for message in lines[0]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert lines[0]["messages"][0]["content"] == f"What is 0? {HOSTILE}"
    assert all("weight" not in message for line in lines for message in line["messages"])


def test_lines_are_selected_by_reward_and_group(run):
    assert len(export(run, "--min-reward", "0.25")) == 2
    best = export(run, "--format", "messages", "--best-of-group")
    assert [(line["group_id"], line["reward"]) for line in best] == [("train-0", 0.25), ("train-1", 0.5)]


def test_a_note_says_how_many_rollouts_are_below_their_groups_best(run):
    def notes(*options: str) -> list[str]:
        result = CliRunner().invoke(app, ["export-traces", str(run.folder), *options])
        return result.stderr.splitlines()[1:]

    assert notes() == [
        "note: 1 of 3 rollouts have a lower reward than the best of their group, and are written too; "
        "--min-reward 0.5 writes those with the highest reward only, --best-of-group the best of each group"
    ]
    assert notes("--format", "messages") == notes()
    for options in (["--min-reward", "0"], ["--best-of-group"], ["--format", "jsonl"], ["--format", "dpo"]):
        assert notes(*options) == []


def test_token_rows_are_those_that_the_engine_recorded(run):
    first = export(run, "--format", "jsonl")[0]
    (row,) = first["rows"]
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row["mask"] == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert first["rollout_id"] == run.multi_turn
    assert first["rewards"] == {"reward": 0.0} or list(first["rewards"].values()) == [0.0]


def test_a_file_is_replaced_as_a_whole(run, tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text("old")
    result = CliRunner().invoke(app, ["export-traces", str(run.folder), "--output", str(file)])
    assert result.exit_code == 0
    assert len(file.read_text().splitlines()) == 3
    assert "3 lines" in result.stderr
    failed = CliRunner().invoke(
        app, ["export-traces", str(run.folder), "--output", str(file), "--min-reward", "9"]
    )
    assert isinstance(failed.exception, DatasetError)
    assert len(file.read_text().splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_sft_trains_the_recorded_tokens(run):
    algorithm = rl.SFT(model=STARTER_MODEL, data=run.folder, min_reward=0.0)
    data = load_supervised_data(algorithm, STARTER_MODEL, LearnerConfig())
    assert data.train[0].source == run.multi_turn
    (rows,) = data.train[0].answers
    assert rows[0].tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert rows[0].mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]


def test_dpo_learns_the_best_over_the_worst_of_a_group(run):
    algorithm = rl.DPO(model=STARTER_MODEL, data=run.folder / "store.db")
    data = load_supervised_data(algorithm, STARTER_MODEL, LearnerConfig())
    (pair,) = data.train
    assert pair.source == "abcd1234-train-0-1 and abcd1234-train-0-0"
    assert [rows[0].tokens.tolist() for rows in pair.answers] == [[1, 2, 3, 4, 5], list(range(1, 10))]


def test_a_run_without_good_rollouts_is_an_error(run, tmp_path):
    algorithm = rl.SFT(model=STARTER_MODEL, data=run.folder, min_reward=0.9)
    with pytest.raises(
        DatasetError, match=r"no rollouts that succeeded in the split 'train' and a reward of at least 0.9"
    ):
        load_supervised_data(algorithm, STARTER_MODEL, LearnerConfig())
    with pytest.raises(ConfigError, match="there is no store"):
        load_supervised_data(rl.SFT(model="m", data=tmp_path), STARTER_MODEL, LearnerConfig())


def test_rollouts_of_a_model_with_another_tokenizer_are_an_error(tmp_path):
    import asyncio

    recorded = asyncio.run(record_run(tmp_path / "run"))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(tmp_path / "run" / "model"), TOOL_MODEL))
    with pytest.raises(ConfigError, match="whose tokenizer is not that of"):
        load_supervised_data(
            rl.SFT(model=STARTER_MODEL, data=recorded.folder), STARTER_MODEL, LearnerConfig()
        )


@pytest.mark.parametrize("kind", [rl.SFT, rl.DPO])
def test_agents_that_the_run_does_not_train_are_not_learned(tmp_path, kind):
    import asyncio

    recorded = asyncio.run(record_run(tmp_path / "run"))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("name: run-1", "name: run-1\n  trained_agents: solver"))
    for format in ("sft", "dpo", "messages"):
        assert export(recorded, "--format", format) == []
    assert all(line["rows"] == [] for line in export(recorded, "--format", "jsonl"))
    with pytest.raises(DatasetError, match=r"no rollout of .* has tokens that the run's settings train"):
        load_supervised_data(kind(model=STARTER_MODEL, data=recorded.folder), STARTER_MODEL, LearnerConfig())


def test_a_note_says_that_the_runs_model_is_not_there(run):
    data = load_supervised_data(rl.SFT(model=STARTER_MODEL, data=run.folder), STARTER_MODEL, LearnerConfig())
    assert any("so its tokenizer is not compared" in note for note in data.notes)


def test_a_note_says_how_many_learned_rollouts_are_below_their_groups_best(run):
    def notes(**settings) -> list[str]:
        algorithm = rl.SFT(model=STARTER_MODEL, data=run.folder, **settings)
        return load_supervised_data(algorithm, STARTER_MODEL, LearnerConfig()).notes

    expected = (
        "data: 1 of 3 rollouts have a lower reward than the best of their group, and are learned too; "
        "min_reward=0.5 learns those with the highest reward only, best_of_group=True the best of each group"
    )
    assert expected in notes()
    assert not any("best of" in note for note in notes(min_reward=0.0))
    assert not any("best of" in note for note in notes(best_of_group=True))


@pytest.mark.slow
def test_trl_reads_exported_pairs(tmp_path):
    """TRL renders and tokenises pairs as it does for its own training."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    }
    arguments = trl.DPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    trainer = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(STARTER_MODEL),
        args=arguments,
        train_dataset=Dataset.from_list([record]),
        processing_class=AutoTokenizer.from_pretrained(STARTER_MODEL),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    algorithm = rl.DPO(model=STARTER_MODEL, data=[record])
    (example,) = load_supervised_data(algorithm, STARTER_MODEL, LearnerConfig()).train
    for number, (row,) in enumerate(example.answers):
        length = int(inputs["attention_mask"][number].sum())
        assert inputs["input_ids"][number, :length].tolist()[: len(row.tokens)] == row.tokens.tolist()


@pytest.mark.parametrize("kind", ["sft", "messages", "jsonl"])
async def test_halves_of_characters_are_written_as_question_marks(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("recorded_run.HOSTILE", "\ud83d")
    run = await record_run(tmp_path / "run-1")
    result = CliRunner().invoke(app, ["export-traces", str(run.folder), "--format", kind])
    assert len(result.stdout.splitlines()) == 3, result.exception
    assert '"content": "What is 0? ?"' in result.stdout or kind == "jsonl"


async def test_rows_without_messages_are_counted(tmp_path):
    recorded = await record_run(tmp_path / "run")
    async with open_box(recorded.folder / "store.db", Clock(2_000.0)) as box:
        await box.store.enqueue_rollout(
            "task", mode="train", group_id="train-9", rollout_id="abcd1234-train-9-0"
        )
        await box.store.cancel_rollouts([recorded.undecided])
        rollout = await box.again()
        await record_call(box, rollout, 0, 8)
        await record_call(box, rollout, 0, 9, "completions")
        await box.store.finish_attempt(rollout, "succeeded", spans=[reward_of(rollout, 1.0)])
    for format, lines, words in (("sft", 1, ", 1 other rows without messages"), ("jsonl", 1, "")):
        options = ["--format", format, "--min-reward", "1"]
        result = CliRunner().invoke(app, ["export-traces", str(recorded.folder), *options])
        assert len(result.stdout.splitlines()) == lines
        assert result.stderr == f"{lines} lines{words}\n"


@pytest.mark.parametrize(
    ("column", "damage"),
    [
        ("rollouts.input", b"\xc1"),
        ("rollouts.metadata", b"\x92\x01"),
        ("rollouts.config", "{"),
        ("spans.body", "[1"),
        ("calls.generation", b"\xc1"),
        ("calls.generation", encode_payload(["model", b"abc", b"", b"", 0])),
    ],
)
def test_a_damaged_value_of_a_store_is_a_typed_error(run, tmp_path, column, damage):
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    table, _, name = column.partition(".")
    with contextlib.closing(sqlite3.connect(copy / "store.db")) as file, file:
        assert file.execute(f"UPDATE {table} SET {name} = ?", (damage,)).rowcount
    result = CliRunner().invoke(app, ["trace", str(copy), "--last", "9"])
    assert isinstance(result.exception, StoreError), result.exception
    assert "the store's file is damaged: a stored value cannot be decoded" in str(result.exception)
