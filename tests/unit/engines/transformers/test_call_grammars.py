"""Grammars of tool calls: each notation's own form is allowed, and no other name or type."""

import json
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer

from raylight.engines.grammar import Grammars
from raylight.engines.transformers.tools import FORMATS
from raylight.quickstart import TOOL_MODEL

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"weather": SCHEMA, "time": {"type": "object", "properties": {}}}
ARGUMENTS = '{"city": "Bonn", "days": 3}'
QWEN = (
    "<function=weather>\n<parameter=city>\nBonn\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n"
)
DSML = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen_xml": f"<tool_call>\n{QWEN}</tool_call>",
    "seed_xml": f"<seed:tool_call>\n{QWEN}</seed:tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": f"<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
}
"""A call in the form of each family's template."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = AutoTokenizer.from_pretrained(TOOL_MODEL)
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def allows(grammar: Any, text: str) -> bool:
    """Return True if a grammar allows a text, and then the end."""
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


def test_the_notations_with_a_grammar_are_these() -> None:
    assert {name for name, notation in FORMATS.items() if notation.grammar(TOOLS, True, True)} == {
        *CALLS,
        "llama_json",
    }


@pytest.mark.parametrize("notation", CALLS)
async def test_a_required_call_has_the_notations_form_and_the_schemas_types(
    notation: str, grammars: Grammars
) -> None:
    form, text = FORMATS[notation], CALLS[notation]
    structure = form.grammar(TOOLS, required=True, parallel=False)
    assert structure is not None
    grammar = await grammars.compile_structure(structure)
    assert allows(grammar, text)
    for other in (text.replace("weather", "wether"), text.replace("3", "three"), "Sunny.", f"Well. {text}"):
        assert not allows(grammar, other), other
    (call,) = form.read(text.removeprefix(form.open).removesuffix(form.close), TOOLS) or ()
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn", "days": 3})


@pytest.mark.parametrize("notation", CALLS)
async def test_text_may_precede_an_optional_call(notation: str, grammars: Grammars) -> None:
    structure = FORMATS[notation].grammar(TOOLS, required=False, parallel=True)
    assert structure is not None
    grammar = await grammars.compile_structure(structure)
    matcher = xgrammar.GrammarMatcher(grammar)
    assert matcher.accept_string(f"Let me see. {CALLS[notation]}")
    assert not xgrammar.GrammarMatcher(grammar).accept_string(CALLS[notation].replace("3", "three"))
