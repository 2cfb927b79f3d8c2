"""Report of a model as the engines read it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_vlms import build_vlm
from transformers import AutoTokenizer

from raylight.engines.model_report import report_model
from raylight.errors import ModelNotFoundError
from raylight.quickstart import STARTER_MODEL

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
HERMES = '{% if tools %}{{ tools | tojson }}<tool_call>{"name": f, "arguments": {} }{% endif %}' + PLAIN
QWEN_XML = "{% if tools %}{{ tools | tojson }}<tool_call><function=f><parameter=a>{% endif %}" + PLAIN
THINKING = "<think>...</think>"
ODD = "{% if tools %}{{ tools | tojson }}[[call]]{% endif %}" + PLAIN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STARTER_MODEL, tmp_path / "model"))


def styled(model: Path, template: str | None) -> str:
    """Give a model another chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (model / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    return str(model)


@pytest.mark.parametrize(
    ("template", "transformers", "vllm"),
    [
        (HERMES, "hermes", "hermes"),
        (QWEN_XML, "qwen_xml", "qwen3_coder"),
        (ODD, None, None),
        (PLAIN, None, None),
        (None, None, None),
    ],
)
def test_the_tool_parser_of_each_engine(
    model: Path, template: str | None, transformers: str | None, vllm: str | None
) -> None:
    path = styled(model, template)
    reports = {engine: report_model(path, engine) for engine in ("transformers", "vllm")}
    assert {engine: report.tool_parser for engine, report in reports.items()} == {
        "transformers": transformers,
        "vllm": vllm,
    }
    for engine, report in reports.items():
        assert (report.has_template, report.tools_in_template) == (
            bool(template),
            "tools" in (template or ""),
        )
        assert report.context_length == 2048
        remedies = " ".join(f"{problem}: {remedy}" for problem, remedy in report.remedies().items())
        if template is None:
            assert "no chat template" in remedies
        elif template == PLAIN:
            assert "does not show the tools" in remedies
        elif template == ODD:
            assert ("tool_parser" if engine == "transformers" else "tool_call_parser") in remedies
        else:
            assert remedies == ""


def test_settings_override_what_is_detected(model: Path) -> None:
    path = styled(model, ODD)
    report = report_model(path, "transformers", {"tool_parser": "llama_json", "reasoning": True})
    assert (report.tool_parser, report.reasoning, report.remedies()) == ("llama_json", THINKING, {})
    args = {"tool_call_parser": "pythonic", "reasoning_parser": "qwen3", "chat_template": HERMES}
    report = report_model(path, "vllm", args)
    assert (report.tool_parser, report.reasoning, report.remedies()) == ("pythonic", "qwen3", {})


def test_reasoning_that_an_engine_leaves_in_the_answer(model: Path) -> None:
    path = styled(model, HERMES + "<think>\n")
    assert report_model(path, "transformers").reasoning == THINKING
    assert report_model(path, "vllm").reasoning == "qwen3"
    report = report_model(path, "vllm", {"reasoning_parser": None})
    assert report.rows()["reasoning"] == "left in the answer"
    assert "reasoning_parser" in next(iter(report.remedies().values()))


@pytest.mark.parametrize(
    "content",
    [
        '{"model_type": "foreign", "auto_map": {"AutoConfig": "configuration_foreign.ForeignConfig"}}',
        '{"model_type": "foreign"}',
        "{",
    ],
)
def test_a_configuration_that_transformers_cannot_read_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    code = tmp_path / "configuration_foreign.py"
    code.write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelNotFoundError, match=r"transformers cannot read .*is never run"):
        report_model(str(tmp_path), "transformers")


def test_a_model_that_takes_images(tmp_path: Path) -> None:
    path = build_vlm("gemma3", tmp_path)
    report = report_model(path, "transformers")
    assert report.rows()["images"] == "taken"
    assert not any("vision" in problem for problem in report.remedies())
    (tmp_path / "preprocessor_config.json").unlink()
    report = report_model(path, "transformers")
    assert report.rows()["images"] == "refused"
    (remedy,) = (
        text
        for problem, text in report.remedies().items()
        if "its processor cannot be loaded (OSError" in problem
    )
    assert "preprocessor_config.json or processor_config.json" in remedy


def test_a_model_of_text_alone(model: Path) -> None:
    assert report_model(str(model), "vllm").rows()["images"] == "refused (it has no vision part)"
