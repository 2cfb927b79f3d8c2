"""The catalogue, the rows of its data sets, and its agent with scripted answers."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylight.agent.resources import LLM
from raylight.benchmarks import agent as agent_module
from raylight.benchmarks.agent import BenchmarkAgent
from raylight.benchmarks.catalogue import BENCHMARKS, find_benchmark, print_catalogue, print_published
from raylight.benchmarks.data_sets import read_rows
from raylight.errors import ConfigError, DatasetError, SandboxError

from .test_answers import SAMPLES

FILES = {"bfcl": "bfcl", "math500": "math500"}


def sample_rows(name: str) -> list[Any]:
    return read_rows(BENCHMARKS[name], str(SAMPLES / FILES.get(name, f"{name}.jsonl")))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_asks_its_rows(name: str) -> None:
    benchmark = find_benchmark(name)
    for row in sample_rows(name):
        assert len(benchmark.prompt.format(**row)) > 20
    assert benchmark.published
    assert all(
        0 < figure.percent < 100 and figure.source.startswith("http") for figure in benchmark.published
    )


def test_the_prompts_keep_braces() -> None:
    row = sample_rows("math500")[0]
    prompt = BENCHMARKS["math500"].prompt.format(**row)
    assert row["problem"] in prompt
    assert prompt.endswith("\\boxed{}.")


def test_an_unknown_name_lists_the_catalogue() -> None:
    with pytest.raises(ConfigError, match=r"no benchmark 'gsm9k'; the benchmarks are gsm8k .*bfcl"):
        find_benchmark("gsm9k")


def test_the_catalogue_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    print_catalogue()
    print_published(BENCHMARKS["gsm8k"])
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in BENCHMARKS)
    assert "0.845  Llama-3.1-8B-Instruct (8 examples), https://huggingface.co/meta-llama" in shown


# rows


def test_a_folder_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = sample_rows("gsm8k")
    (tmp_path / "main").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "main/test-00000-of-00001.parquet")
    assert list(read_rows(BENCHMARKS["gsm8k"], str(tmp_path))) == rows
    assert list(read_rows(BENCHMARKS["gsm8k"], str(tmp_path), 2)) == rows[:2]


def test_lines_of_json_end_at_newlines_only(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / "bfcl", tmp_path / "bfcl")
    file = folder / "BFCL_v3_simple.json"
    content = file.read_text(encoding="utf-8")
    row = content.split("\n")[0]
    text = json.loads(row)["question"][0][0]["content"]
    file.write_text(content.replace(text[:4], f"{text[:4]}\u2028\x85", 1), encoding="utf-8")
    rows = read_rows(BENCHMARKS["bfcl"], str(folder))
    assert rows[0]["question"][0][0]["content"] == f"{text[:4]}\u2028\x85{text[4:]}"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(DatasetError, match="line 1 is not valid JSON"):
        read_rows(BENCHMARKS["bfcl"], str(folder))


def test_a_missing_file_is_named_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "bfcl/BFCL_v3_simple.json", tmp_path)
    with pytest.raises(
        DatasetError, match=r"no file possible_answer/BFCL_v3_simple.json .*`hf download gorilla"
    ):
        read_rows(BENCHMARKS["bfcl"], str(tmp_path))


def test_rows_of_another_data_set_are_refused() -> None:
    with pytest.raises(
        DatasetError, match=r"a row of mmlu lacks choices; its rows have the columns question"
    ):
        read_rows(BENCHMARKS["mmlu"], str(SAMPLES / "gsm8k.jsonl"))


def test_the_hub_is_read_at_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repo: str, name: str, repo_type: str, revision: str) -> str:
        assert (repo, repo_type, len(revision)) == ("HuggingFaceH4/MATH-500", "dataset", 40)
        raise ConnectionError("offline mode is enabled")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(DatasetError, match=r"test.jsonl .* cannot be fetched: offline mode .*--data FOLDER"):
        read_rows(BENCHMARKS["math500"])


# the agent


def answering(monkeypatch: pytest.MonkeyPatch, *answers: str | None) -> list[Any]:
    """Replace the model by answers; return the list of what it is asked."""
    asked, left = [], list(answers)

    async def next_message(llm: LLM, messages: Any, sampling: Any, schemas: Any) -> Any:
        asked.append((messages, sampling, schemas))
        return SimpleNamespace(content=left.pop(0), tool_calls=None)

    monkeypatch.setattr(agent_module, "next_message", next_message)
    return asked


async def run(name: str, row: dict[str, Any], sandbox: str = "process") -> Any:
    agent = pickle.loads(pickle.dumps(BenchmarkAgent(name, sandbox)))
    agent.check({"llm": LLM(model="m")}, ("val",))
    return await agent.rollout_async(row, {"llm": LLM(model="m")}, None)


async def test_the_agent_asks_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, "Answer: 18", "Answer: 17", None)
    row = sample_rows("gsm8k")[0]
    assert [await run("gsm8k", row) for _ in range(3)] == [1.0, 0.0, 0.0]
    messages, sampling, schemas = asked[0]
    assert messages[0]["content"].startswith("Janet")
    assert (sampling, schemas) == ({"temperature": 0.0, "max_tokens": 1024}, None)


async def test_function_calls_get_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, "no call")
    assert await run("bfcl", sample_rows("bfcl")[0]) == 0.0
    assert asked[0][2][0]["function"]["name"] == "calculate_triangle_area"


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_code_runs_in_a_sandbox(monkeypatch: pytest.MonkeyPatch, sandbox: str) -> None:
    if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    row = sample_rows("humaneval")[0]
    answering(monkeypatch, row["canonical_solution"], "    return False", "    while True: pass")
    monkeypatch.setattr(agent_module.Check, "timeout_s", 2.0)
    try:
        assert [await run("humaneval", row, sandbox) for _ in range(2)] == [1.0, 0.0]
    except SandboxError as error:
        if "cannot make a sandbox on this machine" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.framework("math_verify")
async def test_mathematics_runs_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, "\\boxed{(3, \\frac{\\pi}{2})}")
    assert await run("math500", sample_rows("math500")[0]) == 1.0


async def test_a_check_that_fails_by_itself_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.benchmarks.answers.VERIFY", "import a_package_that_is_missing")
    monkeypatch.setattr(agent_module, "find_benchmark", find_with_packages)
    answering(monkeypatch, "\\boxed{1}")
    with pytest.raises(
        SandboxError, match=r"(?s)status 1: .*a_package_that_is_missing.*raylight\[benchmarks\]"
    ):
        await run("math500", sample_rows("math500")[0])


def find_with_packages(name: str) -> Any:
    return dataclasses.replace(find_benchmark(name), packages=())


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"ifeval needs lm_eval, langdetect, nltk: .*'raylight\[benchmarks\]'"
    ):
        BenchmarkAgent("ifeval")


def test_untrusted_code_needs_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"bwrap is not installed; .*--sandbox process"):
        BenchmarkAgent("humaneval")
    assert BenchmarkAgent("gsm8k").display_name == "gsm8k"
    with pytest.raises(ConfigError, match=r"choose bubblewrap or process"):
        BenchmarkAgent("humaneval", "docker")
