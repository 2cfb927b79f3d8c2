"""Notations of tool calls and reasoning, found in the real chat templates of TRL's package."""

import ast
import importlib.util
from pathlib import Path

import pytest
from trl_templates import read_template

from raylight.engines.families import FAMILIES, find_family, find_style
from raylight.engines.transformers.message import PARSERS


class Tokenizer:
    """The parts of a tokenizer that are read."""

    def __init__(self, template: str, *tokens: str) -> None:
        self.chat_template, self._tokens = template, tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}


@pytest.mark.parametrize(
    ("name", "notation", "vllm_tools", "opening", "vllm_reasoning"),
    [
        ("qwen2_5", "hermes", "hermes", None, None),
        ("qwen3", "hermes", "hermes", "<think>", "qwen3"),
        ("qwen3_instruct_2507", "hermes", "hermes", None, None),
        ("qwen3_6", "qwen_xml", "qwen3_coder", "<think>", "qwen3"),
        ("qwen3_8", "qwen_xml", "qwen3_coder", "<think>", "qwen3"),
        ("glm4moe", "glm", "glm45", "<think>", "glm45"),
        ("gptoss", "harmony", "openai", "<|channel|>analysis<|message|>", "openai_gptoss"),
        ("gemma4_v5", "gemma4", "gemma4", "<|channel>thought\n", "gemma4"),
        ("gemma4_v2", "gemma4", "gemma4", "<|channel>thought\n", "gemma4"),
        ("llama3_1", "llama_json", "llama3_json", None, None),
        ("llama3_2", "llama_json", "llama3_json", None, None),
        ("nemotron_3_nano", "qwen_xml", "qwen3_coder", "<think>", "qwen3"),
        ("lfm2_v2", "lfm2", "lfm2", None, None),
        ("lfm2_2_5", "lfm2", "lfm2", "<think>", "qwen3"),
        ("deepseek_r1_distill", None, None, "<think>", "deepseek_r1"),
        ("gemma3", None, None, None, None),
        ("phi3_5", None, None, None, None),
        ("muse_glimmer", None, None, None, None),
    ],
)
def test_real_templates(
    name: str, notation: str | None, vllm_tools: str | None, opening: str | None, vllm_reasoning: str | None
) -> None:
    style = find_style(Tokenizer(read_template(name)))
    assert (style.notation, style.vllm_tools, style.vllm_reasoning) == (notation, vllm_tools, vllm_reasoning)
    assert (style.reasoning.open if style.reasoning else None) == opening


@pytest.mark.parametrize(
    ("template", "notation"),
    [
        ("[TOOL_CALLS] + name + [CALL_ID] + [ARGS]", "mistral_args"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral_json"),
        ("'<｜tool▁calls▁begin｜>' '<｜tool▁sep｜>' '\\n```json\\n'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜>' '<｜tool▁sep｜>'", "deepseek_v31"),
        ("｜DSML｜ 'function_calls>' 'invoke name='", "deepseek_v32"),
        ("<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi_k2"),
        ('<minimax:tool_call><invoke name="f"><parameter name="k">', "minimax_m2"),
        ("<seed:tool_call><function=f><parameter=k>", "seed_xml"),
        ('<|START_ACTION|>[{"tool_name": n, "parameters": p}]', "cohere"),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite"),
        ("<TOOLCALL>[]</TOOLCALL>", "nemotron_json"),
        ("<functions></functions><function_calls></function_calls>", "olmo3"),
        ("<tool_call>", None),
        ("<tool_calls>[", None),
    ],
)
def test_a_notation_needs_all_its_markers(template: str, notation: str | None) -> None:
    family = find_family(template)
    assert (family.notation if family else None) == notation
    style = find_style(Tokenizer("{{ tools }}" + template))
    assert style.notation == notation
    assert ("matches no known notation" in style.reason) == (notation is None)
    assert find_style(Tokenizer(template.replace("tools", ""))).notation is None, "it shows no tools"


def test_tokenizer_and_architecture_decide_what_templates_leave_open() -> None:
    lfm2 = read_template("lfm2")
    assert find_style(Tokenizer(lfm2)).notation is None
    style = find_style(Tokenizer(lfm2, "<|tool_call_start|>", "<|tool_call_end|>"))
    assert style.notation == "lfm2"
    assert "the tokenizer has <|tool_call_start|>" in style.reason
    phi = Tokenizer("<|tool|>{{ tools }}<|/tool|>", "<|tool_call|>", "<|/tool_call|>")
    assert (find_style(phi).notation, find_style(phi).vllm_tools) == ("phi4_mini", None)
    nemotron = Tokenizer(read_template("nemotron_3_nano"))
    style = find_style(nemotron, "nemotron_h")
    assert (style.vllm_reasoning, "the architecture is nemotron_h" in style.reason) == ("nemotron_v3", True)


def test_every_notation_has_a_parser() -> None:
    assert {family.notation for family in FAMILIES} == set(PARSERS)


def test_the_parsers_of_vllm_are_registered() -> None:
    """Read from the source of vLLM, where it is installed."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("vLLM is not installed")
    folder = Path(str(vllm.origin)).parent

    def registered(package: str, name: str) -> set[str]:
        tree = ast.parse((folder / package / "__init__.py").read_text())
        assigned = {
            statement.targets[0].id: ast.literal_eval(statement.value)
            for statement in tree.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
            if isinstance(statement.value, ast.Dict)
        }
        return set(assigned[name])

    tools = {family.vllm_tools for family in FAMILIES} - {None}
    assert tools <= registered("tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
    reasoning = {family.vllm_reasoning for family in FAMILIES} - {None}
    assert reasoning | {"deepseek_r1"} <= registered("reasoning", "_REASONING_PARSERS_TO_REGISTER")
