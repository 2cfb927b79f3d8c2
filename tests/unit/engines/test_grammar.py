"""Grammars: the white space that they allow, and errors of schemas and of xgrammar."""

import json
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer

from raylight.engines.grammar import MAX_WHITE_SPACE, Grammars
from raylight.http.errors import RequestError
from raylight.quickstart import STARTER_MODEL

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def accepts(grammar: Any, text: str) -> bool:
    return xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True).accept_string(text)


async def test_white_space_in_json_is_limited(grammars: Grammars) -> None:
    tag = {"type": "tag", "begin": "<call>", "content": CONTENT, "end": "</call>"}
    schema = await grammars.compile_schema(SCHEMA)
    structure = await grammars.compile_structure({"type": "or", "elements": [CONTENT, tag]})
    assert accepts(schema, json.dumps({"a": 1}, indent=4))
    for count, allowed in ((0, True), (MAX_WHITE_SPACE, True), (MAX_WHITE_SPACE + 1, False)):
        text = "{" + " " * count + '"a": 1}'
        assert accepts(schema, text) == allowed
        assert accepts(structure, text) == allowed
        assert accepts(structure, f"<call>{text}</call>") == allowed


async def test_an_error_of_all_schemas_is_xgrammars(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="the schema cannot be compiled") as caught:
        await grammars.compile_schema({"type": "nonsense"})
    assert caught.value.status == 400

    def fail(self: Any, schema: str) -> None:
        """Fail as a version without the argument `max_whitespace_cnt` does."""

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_json_schema", fail)
    with pytest.raises(RequestError, match=r"failed on this server.*max_whitespace_cnt.*reinstall") as caught:
        await grammars.compile_schema(SCHEMA)
    assert caught.value.status == 501


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "response_format.json_schema.schema: (no value fits the schema|.*Circular)"),
        ({"allOf": [{"$ref": "#"}]}, "no value fits the schema"),
        ({"type": "string", "pattern": "(a{1,999}){1,999}"}, "too large to constrain an answer: at pattern"),
        ({"anyOf": [False]}, "the schema cannot be compiled"),
    ],
)
async def test_a_schema_that_constrains_nothing_useful_is_refused(
    grammars: Grammars, schema: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await grammars.compile_schema(schema)
    assert caught.value.status == 400


async def test_a_schema_that_does_not_compile_is_compiled_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it is refused without a thread, so that it cannot delay other schemas."""
    schema = {"type": "nonsense"}
    for _ in range(2):
        with pytest.raises(RequestError, match=r"tools: the schema cannot be compiled"):
            await grammars.compile_schema(schema, "tools")
        monkeypatch.setattr(grammars, "_threads", None)
